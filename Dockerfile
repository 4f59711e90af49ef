# ppocli on an NVIDIA GPU: docker build -t ppocli . && docker run --rm -it --gpus all ppocli
FROM pytorch/pytorch:2.9.1-cuda12.8-cudnn9-runtime
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY ppocli ppocli
COPY conf conf
COPY recipes recipes
RUN pip install --no-cache-dir ".[peft,8bit]"
WORKDIR /runs
CMD ["bash"]
