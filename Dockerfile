# everfed for a server and its clients: docker build -t everfed .   (examples/federation/compose.yaml builds and runs it)
# With CUDA: docker build --build-arg TORCH=torch==2.13.0 --build-arg INDEX=https://pypi.org/simple -t everfed:cuda .
FROM python:3.12-slim

ARG TORCH=torch==2.13.0
ARG INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1

WORKDIR /opt/everfed
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY everfed everfed
# torch first and alone, so that no later requirement makes pip fetch another, larger build
RUN pip install --index-url "$INDEX" --extra-index-url https://pypi.org/simple -c constraints.txt "$TORCH" \
    && pip install -c constraints.txt '.[flower,privacy,images]'

# nothing here needs root; folders for state and runs are mounted
RUN useradd --create-home --uid 1000 everfed && mkdir -p /srv/everfed /state && chown everfed /srv/everfed /state
USER everfed
WORKDIR /srv/everfed
CMD ["everfed", "doctor"]
