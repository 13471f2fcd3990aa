# GPU image. NVIDIA's container carries torch, Transformer Engine and NVIDIA's apex, built for each other;
# nothing here may replace them. The base is the one that Megatron-LM names for the release of
# megatron-core (docker/.ngc_version.dev there). Nobody has built or run this file yet.
#
#   docker build -t copus .                                                              # 0.16.1
#   docker build -t copus --build-arg BASE=nvcr.io/nvidia/pytorch:26.06-py3 --build-arg CORE=0.19.2 .
#   docker run --rm --init --gpus all --ipc=host -u "$(id -u):$(id -g)" -v "$PWD/runs:/runs" copus \
#       torchrun --nproc-per-node 8 pretrain_gpt.py ...
ARG BASE=nvcr.io/nvidia/pytorch:25.11-py3
FROM ${BASE}
ARG CORE=0.16.1

WORKDIR /workspace/copus
COPY requirements/container requirements/container
# pip checks every file by its hash, and takes no dependency that is not listed. The folder /opt/copus
# comes last on Python's path, so that it only adds what the container lacks. The container's own
# constraints do not hold for it.
RUN export PIP_CONSTRAINT= PIP_NO_CACHE_DIR=1 PIP_ONLY_BINARY=:all: \
    && pip install --require-hashes --no-deps -r requirements/container/megatron-core-${CORE}.txt \
    && pip install --require-hashes --no-deps --target /opt/copus -r requirements/container/others.txt \
    && python -c "import site; open(site.getsitepackages()[0] + '/copus.pth', 'w').write('/opt/copus\n')" \
    && python -c "import jinja2, packaging, psutil, rich, tensorboard.compat.proto.event_pb2, tqdm, yaml"

COPY . .
RUN chmod -R a+rX .

# PYTHONPATH puts this repository's megatron.trainer first, from any working directory. The other
# variables: restarts of torchrun read stale keys of a shared store (pytorch issue 135712), and a user
# without a home directory needs a place for compiled kernels.
ENV PYTHONPATH=/workspace/copus \
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
    TORCHINDUCTOR_CACHE_DIR=/tmp/inductor \
    TRITON_CACHE_DIR=/tmp/triton

# Names the versions, and ends the build where they are not made for each other. It imports nothing:
# without a driver Transformer Engine does not load.
RUN python -m megatron.trainer.resilience.env_checks
