# The serving image.
#   CPU:  docker build --tag shoal .
#   GPU:  docker build --tag shoal:gpu --build-arg DEVICE=gpu .
#   run:  docker run --shm-size 2g --publish 8000:8000 shoal
#         docker run --gpus all --shm-size 16g --publish 8000:8000 --volume /models:/models:ro shoal:gpu \
#             --model /models/DeepSeek-V2-Lite-Chat
# torch's wheels bring the CUDA libraries; the host brings only its driver and the NVIDIA container toolkit.
FROM python:3.11-slim

ARG DEVICE=cpu
# A package index to take torch from, where its default build is not the one wanted (see README.md).
ARG TORCH_INDEX=

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0

# Triton compiles its launchers with the system's C compiler.
RUN if [ "$DEVICE" = gpu ]; then \
        apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi

WORKDIR /opt/shoal

# torch by itself: a layer of gigabytes that a change of the code does not rebuild.
COPY constraints constraints
RUN if [ -n "$TORCH_INDEX" ]; then \
        pip install --constraint "constraints/$DEVICE.txt" --no-deps --index-url "$TORCH_INDEX" torch; \
    fi && pip install --constraint "constraints/$DEVICE.txt" torch

COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY layers layers
COPY workers workers
COPY serve serve
RUN if [ "$DEVICE" = gpu ]; then extras='[gpu]'; fi; pip install --constraint "constraints/$DEVICE.txt" ".$extras"

COPY examples/tiny-model examples/tiny-model

RUN useradd --create-home --uid 1000 shoal
USER shoal

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]

ENTRYPOINT ["shoal", "serve", "--host", "0.0.0.0"]
CMD ["--model", "/opt/shoal/examples/tiny-model", "--tp", "2", "--device", "cpu"]
