# ncf in a container. Not built where it was written, as there was no Docker engine at hand; please report what is amiss.
#
# CPU (default):  docker build -t ncf .
#                 On x86-64 pip's default torch is a CUDA build: it runs on a CPU too, but is gigabytes larger. For the small
#                 one, name the package index of PyTorch's CPU wheels:  --build-arg TORCH_INDEX=<its address>
# CUDA:           docker build -t ncf:cuda --build-arg DEVICE=cuda .
#                 adds the C compiler that `--compile` needs; leave TORCH_INDEX empty. The host needs NVIDIA's driver and
#                 container toolkit.
#
# Use, with files in the current directory:
#   docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" ncf prepare ratings.csv -o data/mine
#   docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" --gpus all ncf:cuda train --data data/mine

ARG BASE=python:3.12-slim
FROM ${BASE}

ARG DEVICE=cpu
ARG TORCH_INDEX=""

RUN case "$DEVICE" in \
        cpu) ;; \
        cuda) apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev \
              && rm -rf /var/lib/apt/lists/* ;; \
        *) echo "DEVICE must be cpu or cuda: got $DEVICE" >&2; exit 1 ;; \
    esac

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
# Of one version pip prefers the wheel with a local label (such as +cpu), so an extra index is enough.
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints.txt .

# Any user may run it (--user): caches go to /tmp, and torch's compiler wants a user name.
ENV HOME=/tmp USER=ncf PYTHONUNBUFFERED=1
RUN useradd --uid 1000 --no-create-home ncf && mkdir /work && chown ncf /work
USER ncf
WORKDIR /work
VOLUME /work

ENTRYPOINT ["ncf"]
CMD ["--help"]
