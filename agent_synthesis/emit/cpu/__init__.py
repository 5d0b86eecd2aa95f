"""Schedules of the CPU: C++ that g++ compiles and vectorises, its blocks spread over threads by OpenMP."""
