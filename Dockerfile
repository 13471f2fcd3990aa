# GPU image. NVIDIA's container carries torch, Transformer Engine and NVIDIA's apex, built for each other;
# nothing here may replace them. This file is not built in continuous integration.
#
#   docker build -t copus .
#   docker run --rm --init --gpus all --ipc=host -u "$(id -u):$(id -g)" -v "$PWD/runs:/runs" copus \
#       torchrun --nproc-per-node 8 pretrain_gpt.py ...
ARG BASE=nvcr.io/nvidia/pytorch:25.06-py3
FROM ${BASE}

# --no-deps: pip would otherwise be free to exchange the container's torch.
RUN pip install --no-cache-dir --no-deps megatron-core==0.16.1 \
    && pip install --no-cache-dir psutil pyyaml rich tqdm packaging tensorboard jinja2

WORKDIR /workspace/copus
COPY . .
RUN chmod -R a+rX .

# PYTHONPATH puts this repository's megatron.trainer first, from any working directory. The other
# variables: restarts of torchrun read stale keys of a shared store (pytorch issue 135712), and a user
# without a home directory needs a place for compiled kernels.
ENV PYTHONPATH=/workspace/copus \
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \
    TORCHINDUCTOR_CACHE_DIR=/tmp/inductor \
    TRITON_CACHE_DIR=/tmp/triton

RUN python -c "from megatron.trainer.resilience.env_checks import check_environment; check_environment()"
