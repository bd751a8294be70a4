# The image of headway.def for podman, docker, and from there enroot and pyxis: podman build -t headway -f slurm/containers/headway.Dockerfile .
FROM docker.io/nvidia/cuda:13.0.3-devel-ubuntu24.04

COPY setup.cfg pyproject.toml README.md LICENSE /opt/headway/src/
COPY constraints /opt/headway/src/constraints
COPY conf /opt/headway/src/conf
COPY slurm /opt/headway/src/slurm
COPY launcher /opt/headway/src/launcher
COPY workers /opt/headway/src/workers

RUN /opt/headway/src/slurm/containers/install.sh

ENV PATH=/opt/headway/venv/bin:/usr/local/cuda/bin:$PATH
ENV CUDA_HOME=/usr/local/cuda
# Packages in a user's home, which pyxis can mount, are not this image's.
ENV PYTHONNOUSERSITE=1
ENV LC_ALL=C.UTF-8

RUN /opt/headway/src/slurm/containers/install.sh check

# The base's own prints a banner into whatever is read from a command.
ENTRYPOINT []
CMD ["headway", "--help"]
