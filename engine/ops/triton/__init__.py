"""The operations as Triton kernels, for NVIDIA GPUs; on a CPU by Triton's interpreter (TRITON_INTERPRET=1), slowly.

Each stands beside its torch path in `engine.ops.reference`, which it is tested against.
"""
