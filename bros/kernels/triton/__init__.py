"""Kernels in Triton, for CUDA.

plan         the work list of a step's attention, in NumPy
buffers      the work list in device memory, also at fixed addresses for graphs
settings     tile sizes per device, read from tuned/*.json
attention    launches attention_kernels
ops          launches elementwise_kernels; implements Kernels
sampling     launches sampling_kernels
*_kernels    device code
"""
