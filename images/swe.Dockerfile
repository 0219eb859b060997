# A task made of a release: a base with what its tests need, and the release's files as a repository of one commit at
# /testbed. Nothing of the release is run: what its own build says of it (metadata) was made in a sandbox before.
ARG BASE
FROM ${BASE}
ARG SITE
ARG ROOTS
ARG MESSAGE
USER 0:0
COPY site/metadata ${SITE}
COPY site/testbed /testbed
RUN chown -R 65534:65534 /testbed
USER 65534:65534
ENV HOME=/tmp TZ=UTC PYTHONHASHSEED=0 PYTHONPATH=${ROOTS}
WORKDIR /testbed
# The same files give the same commit, whenever they are built.
RUN git init -q -b main \
    && printf '%s\n' '__pycache__/' '*.pyc' '.pytest_cache/' '.hypothesis/' '*.egg-info/' >.git/info/exclude \
    && git config core.hooksPath /dev/null \
    && git add -A -f \
    && GIT_AUTHOR_DATE='2000-01-01T00:00:00Z' GIT_COMMITTER_DATE='2000-01-01T00:00:00Z' \
       git -c user.name=agentkit -c user.email=agentkit@localhost -c gc.auto=0 commit -q -m "${MESSAGE}"
