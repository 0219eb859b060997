# agentkit/base: what sandboxes run by default. BASE is any Linux image with a shell and Python 3.8 or newer;
# debootstrap.sh makes one where no registry can be reached. Nothing here needs a network.
ARG BASE
FROM ${BASE}
USER 0:0
# Nothing in the image may lend anybody rights, or be changed by anybody; /workspace is where the tmpfs goes.
RUN python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' \
    && find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
    && mkdir -p /workspace
# Without these, programs write caches and ask questions.
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 DEBIAN_FRONTEND=noninteractive LANG=C.UTF-8
ENTRYPOINT []
CMD ["python3"]
USER 65534:65534
WORKDIR /workspace
