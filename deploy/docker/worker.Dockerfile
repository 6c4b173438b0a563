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
# first, since they take minutes, and change less often than the rest: the wheel takes them from the user's cache
COPY triptych/__init__.py triptych/user_cache.py ./triptych/
COPY triptych/layers/__init__.py triptych/layers/kernel_variants.py ./triptych/layers/
COPY triptych/layers/kernels ./triptych/layers/kernels
RUN python3 -c "from triptych.layers.kernel_variants import compile_all, find_compiler; \
    from triptych.user_cache import user_cache; print(*compile_all(find_compiler(), user_cache()), sep='\n')"
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
