# ppocli on an NVIDIA GPU (driver 580 or newer; for an older one, a PyTorch of another CUDA version):
#   docker build -t ppocli . && docker run --rm -it --gpus all -v "$PWD/runs:/runs/runs" ppocli
FROM python:3.12-slim
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /src
COPY constraints.txt ./
# first, and alone: it is large, and stays as it is when the code changes
RUN pip install --no-cache-dir "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY ppocli ppocli
COPY conf conf
COPY recipes recipes
RUN pip install --no-cache-dir -c constraints.txt ".[peft,8bit]"
WORKDIR /runs
CMD ["bash"]
