# The frontend: API, router and prompt preparation, without PyTorch. Build it in the checkout:
#   scripts/docker-build frontend
ARG BASE=docker.io/library/python:3.11-slim-bookworm
FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY deploy/docker/constraints.txt ./
COPY triptych ./triptych
# kernels are for instances, so there is no compiler
RUN python3 -m venv /opt/triptych \
    && /opt/triptych/bin/pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt '.[otel]' \
    && /opt/triptych/bin/pip uninstall --yes pip setuptools

FROM ${BASE}
COPY --from=build /opt/triptych /opt/triptych
ENV PATH=/opt/triptych/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 HOME=/tmp
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 8001
ENTRYPOINT ["triptych"]
