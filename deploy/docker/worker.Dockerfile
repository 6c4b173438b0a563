# Instances of all roles. Build it in the checkout:
#   scripts/docker-build worker
#   scripts/docker-build worker-cuda
ARG BASE=docker.io/library/python:3.11-slim-bookworm
FROM ${BASE} AS build
ARG DEVICE=cpu
# where PyTorch without CUDA is; the one with CUDA is on PyPI
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
# extras besides worker: a fabric, since pods share no memory
ARG EXTRAS=nixl,otel
# compiles the kernels for CPUs
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY deploy/docker/constraints.txt ./
COPY triptych ./triptych
RUN python3 -m venv /opt/triptych \
    && if [ "$DEVICE" = cpu ]; then export PIP_EXTRA_INDEX_URL="$CPU_INDEX"; fi \
    && /opt/triptych/bin/pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt \
        ".[worker,$EXTRAS]" \
    && /opt/triptych/bin/pip uninstall --yes pip

FROM ${BASE}
ARG DEVICE=cpu
# Triton compiles what starts its kernels on GPUs when it first runs
# hadolint ignore=DL3008
RUN if [ "$DEVICE" != cpu ]; then \
        apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
COPY --from=build /opt/triptych /opt/triptych
ENV PATH=/opt/triptych/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 HOME=/tmp
USER 10001:10001
WORKDIR /tmp
EXPOSE 8080
ENTRYPOINT ["triptych"]
