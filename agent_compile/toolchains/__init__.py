"""Compilers: what a toolchain is, g++, NVRTC and nvcc, found on this machine and run in jails."""
