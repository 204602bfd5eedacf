# The whole lab in one image. `docker compose up` builds and serves it; without compose: docker run --init, see README.md.
FROM python:3.11-slim

# DEVICE=cuda adds CuPy for the GPU kernels. TORCH_INDEX_URL names a package index with other builds of the pinned torch,
# such as one for CPU alone, which is several gigabytes smaller than the default.
ARG DEVICE=cpu
ARG TORCH_INDEX_URL=

WORKDIR /app
COPY requirements.txt ./
RUN grep -E '^torch(vision)?==' requirements.txt > torch.txt \
    && pip install --no-cache-dir ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} --requirement torch.txt \
    && if [ "$DEVICE" != cuda ]; then sed -i '/^cupy/d' requirements.txt; fi \
    && pip install --no-cache-dir --requirement requirements.txt \
    && rm torch.txt

# The code belongs to root: the lab writes nowhere but below /data.
RUN useradd --system --user-group --uid 10001 --home-dir /data --no-create-home lab \
    && install --directory --owner=lab --group=lab /data
COPY .streamlit .streamlit
COPY comet_core comet_core
COPY storage storage
COPY pages pages
COPY app.py ./

ENV COMET_HOME=/data \
    COMET_HOST=0.0.0.0 \
    HOME=/data \
    NUMBA_CACHE_DIR=/data/numba \
    PORT=8501 \
    PYTHONUNBUFFERED=1
USER 10001
VOLUME /data
EXPOSE 8501
HEALTHCHECK --interval=15s --timeout=5s --start-period=30s --retries=4 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{os.environ[\"PORT\"]}/_stcore/health', timeout=4)"]
CMD ["python", "-m", "storage", "serve"]
