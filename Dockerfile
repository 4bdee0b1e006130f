# attnd for the CPU and for NVIDIA GPUs, in one image. Needs no privileges and no writable file
# system:
#   docker build -t attnd .
#   docker run --rm --read-only --cap-drop=ALL --gpus=all attnd
# It listens on the container's own loopback address until --listen says otherwise (README.md).
ARG DEBIAN=debian:bookworm-20260918-slim@sha256:3783cc01769c7b2b1b83a5c5ad96c815348e28ed7da68e2e3687004faa906251

FROM ${DEBIAN} AS build
WORKDIR /src
COPY deploy/install_packages.sh deploy/lib.sh deploy/
RUN deploy/install_packages.sh

# The CUDA toolkit, from wheels; those bring no names for the linker.
COPY deploy/requirements-cuda.txt deploy/requirements-cuda-build.txt deploy/
RUN python3 -m pip install --no-cache-dir --no-deps --no-compile --require-hashes --target /cuda \
      -r deploy/requirements-cuda.txt -r deploy/requirements-cuda-build.txt \
    && ln -s libcudart.so.13 /cuda/nvidia/cu13/lib/libcudart.so \
    && ln -s libnvrtc.so.13 /cuda/nvidia/cu13/lib/libnvrtc.so \
    && ln -s libcudnn.so.9 /cuda/nvidia/cudnn/lib/libcudnn.so

COPY . .
RUN cmake -S . -B build/image -G Ninja -DCMAKE_BUILD_TYPE=Release -DATTND_BUILD_TESTS=OFF \
      -DATTND_CUDA=ON -DCUDAToolkit_ROOT=/cuda/nvidia/cu13 \
      -DCUDNN_INCLUDE_DIR=/cuda/nvidia/cudnn/include \
      -DCUDNN_LIBRARY=/cuda/nvidia/cudnn/lib/libcudnn.so \
    && cmake --build build/image \
    && deploy/bundle.sh build/image /opt/attnd

FROM ${DEBIAN}
ARG VERSION=unknown
LABEL org.opencontainers.image.title="attnd" \
      org.opencontainers.image.description="A gRPC service that computes attention" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"

# What of CUDA the module opens, where the bundle looks for it.
COPY --from=build /cuda/nvidia/cudnn/lib/ /opt/attnd/lib/nvidia/cudnn/lib/
COPY --from=build /cuda/nvidia/cu13/lib/libcudart.so.13 /cuda/nvidia/cu13/lib/libnvrtc.so.13 \
     /cuda/nvidia/cu13/lib/libnvrtc-builtins.so.13.0 /opt/attnd/lib/nvidia/cu13/lib/
COPY --from=build /cuda/nvidia_cudnn_cu13-*.dist-info/licenses/ /opt/attnd/licenses/nvidia-cudnn/
COPY --from=build /cuda/nvidia_cuda_runtime-*.dist-info/licenses/ /opt/attnd/licenses/nvidia-cuda/
COPY --from=build /opt/attnd/ /opt/attnd/

# NVIDIA_*: what NVIDIA's container runtime brings in. The second address answers the check below,
# wherever the first one is.
ENV PATH=/opt/attnd/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    ATTND_HEALTH_LISTEN=127.0.0.1:50052
USER 65532:65532
EXPOSE 50051
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["attnctl", "--address=127.0.0.1:50052", "health"]
ENTRYPOINT ["attnd"]
