# agentkit/env: agentkit/packages with the agentkit of the host.
ARG BASE
FROM ${BASE}
ARG SITE
USER 0:0
COPY site ${SITE}
RUN python3 -m compileall -q -j 0 ${SITE}/agentkit && python3 -c 'import agentkit.envs, gymnasium, numpy, pydantic'
USER 65534:65534
