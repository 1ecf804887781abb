# The control plane's image: operator and scheduler, which differ in the argument only (`rlinf_operator`,
# `rlinf_scheduler`). No torch, no compiler: everything in the control extra has a wheel. `make images` builds it.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE} AS needs
COPY pyproject.toml /
RUN python3 -c "import tomllib; p = tomllib.load(open('/pyproject.toml', 'rb'))['project']; \
print(*p['dependencies'], *p['optional-dependencies']['control'], sep='\n')" > /control.txt

FROM ${PYTHON_IMAGE} AS build
# pip stays in an environment of its own: the one that is shipped has none.
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/rlinf
WORKDIR /src
# The dependencies alone, and as a file of their own: neither a change of the code nor another line of pyproject.toml
# installs them again.
COPY --from=needs /control.txt /tmp/control.txt
COPY constraints/all.txt constraints/all.txt
RUN /opt/pip/bin/pip --python /opt/rlinf/bin/python install --no-cache-dir --constraint constraints/all.txt \
    --requirement /tmp/control.txt
COPY pyproject.toml README.md LICENSE ./
COPY rlinf_api rlinf_api
COPY operator operator
COPY rlinf_worker rlinf_worker
COPY rljob rljob
RUN /opt/pip/bin/pip --python /opt/rlinf/bin/python install --no-cache-dir --no-deps .

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/rlinf /opt/rlinf
# Unbuffered: the last lines before a crash must be in the log. Bytecode is in the image; nothing can be written there.
# USER and HOME: the number below has no entry in passwd (nor has any that a cluster puts in its place), and Kopf asks
# for its user's name.
ENV PATH=/opt/rlinf/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 USER=rlinf HOME=/tmp
# A number, as the kubelet cannot check runAsNonRoot against a name.
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python", "-m"]
CMD ["rlinf_operator"]
