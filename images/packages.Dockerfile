# agentkit/packages: a base image with what agentkit's environments import, at the host's versions, so that an
# environment plays in a sandbox as it plays on the host. The host lays the packages out; the build needs no network.
ARG BASE
FROM ${BASE}
ARG SITE
USER 0:0
COPY site ${SITE}
# The root is read-only when it runs: what is not compiled now is compiled again by every process.
RUN python3 -m compileall -q -j 0 ${SITE}
USER 65534:65534
