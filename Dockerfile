# An image that runs every job, on CPUs and, with the NVIDIA container toolkit, on GPUs:
#   docker build --tag bootfile .
#   docker run --rm bootfile                                        # make train: real digits, no download
#   docker run --rm --gpus all --ipc host --volume /data:/data bootfile python jobs/train_ddp.py --data_url /data
# --ipc host: data loaders use /dev/shm, of which a container has 64 MB. Of the packages, torch with CUDA is most.
# --build-arg REQUIREMENTS=tests/requirements.txt adds what `make test` needs.
FROM python:3.12-slim

# torch.compile and Triton compile C++ at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 --gid 100 bootfile \
    && install --directory --owner=1000 --group=100 /bootfile

USER 1000:100
WORKDIR /bootfile

# The packages are a layer of their own: a change of the code does not install them again.
ARG REQUIREMENTS=requirements.txt
# pip's own settings, for a mirror: --build-arg PIP_INDEX_URL=URL
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY --chown=1000:100 requirements.txt constraints.txt ./
COPY --chown=1000:100 tests/requirements.txt tests/install.py tests/
RUN python -m venv .venv \
    && UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1 PIP_NO_CACHE_DIR=1 .venv/bin/python tests/install.py -r ${REQUIREMENTS} -c constraints.txt \
    && touch .venv/installed
ENV PATH=/bootfile/.venv/bin:$PATH PYTHONUNBUFFERED=1

COPY --chown=1000:100 . .
CMD ["make", "train"]
