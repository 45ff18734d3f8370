"""Kernels in Triton. Nothing here is imported unless the triton back end was chosen.

plan       the work list of a step's attention, in NumPy
buffers    the list in device memory, also at fixed addresses for graphs
settings   tile sizes per device, read from tuned/*.json
tuning     measures tile sizes on the device that is there
*_kernels  code that runs on the device, and beside each the module that launches it
"""
