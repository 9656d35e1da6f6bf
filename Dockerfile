# CPU:   docker build -t kt_ray .
# CUDA:  docker build -t kt_ray:cuda --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 \
#            --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
# torch brings CUDA's libraries along, so the base needs the driver's interface only. docs/quickstart.md runs it.
ARG BASE=ubuntu:24.04

FROM ubuntu:24.04 AS wheel
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /build
COPY . /src
RUN /build/bin/pip wheel -q --no-deps -w /wheels /src

FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/* && python3 -m venv /opt/kt_ray
COPY constraints.txt /tmp/
# torch first, alone, as in the Makefile: the others then keep the build that the index has.
RUN /opt/kt_ray/bin/pip install -q --no-cache-dir --index-url ${TORCH_INDEX} \
        --extra-index-url https://pypi.org/simple "$(grep '^torch==' /tmp/constraints.txt)" \
    && grep -v '^torch==' /tmp/constraints.txt > /tmp/others.txt
COPY --from=wheel /wheels /tmp/wheels
RUN /opt/kt_ray/bin/pip install -q --no-cache-dir -c /tmp/others.txt /tmp/wheels/*.whl && rm -r /tmp/wheels
ENV PATH=/opt/kt_ray/bin:$PATH
WORKDIR /work
ENTRYPOINT ["kt-ray"]
