# The server in a container. By default pip chooses torch, which on Linux is the CUDA build: one image for GPUs and CPUs.
# For a small image that computes on the CPU alone, pass the index of PyTorch's CPU builds (pytorch.org, "Get Started"):
#   docker build -t headlong:cpu --build-arg TORCH_INDEX=... .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=
RUN python -m venv /opt/headlong \
 && if [ -n "$TORCH_INDEX" ]; then /opt/headlong/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" torch; fi
COPY . /src
RUN /opt/headlong/bin/pip install --no-cache-dir /src

FROM python:${PYTHON}-slim
# Triton compiles its launchers with a C compiler when a GPU serves.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home headlong
COPY --from=build /opt/headlong /opt/headlong
ENV PATH=/opt/headlong/bin:$PATH HEADLONG_HOST=0.0.0.0 HEADLONG_PORT=8000
USER headlong
VOLUME /home/headlong/.cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
  CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"
STOPSIGNAL SIGTERM
ENTRYPOINT ["headlong"]
CMD ["serve"]
