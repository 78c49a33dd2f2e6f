# The server. torch comes with CUDA by default; --build-arg PIP_EXTRA_INDEX_URL=… with PyTorch's index for CPUs makes the image
# several gigabytes smaller.
FROM python:3.11-slim

ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 HF_HOME=/models

WORKDIR /app
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
COPY examples examples
RUN pip install --constraint constraints.txt '.[serve]' \
    && useradd --create-home --uid 10001 server \
    && install --directory --owner server /models

USER server
EXPOSE 8000
VOLUME /models
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# SIGTERM finishes the running requests: give `docker stop` as much time as --shutdown-timeout.
STOPSIGNAL SIGTERM
ENTRYPOINT ["sequencematch", "serve", "--host", "0.0.0.0"]
CMD []
