"""Host code that exports carry: these modules are copied into each exported file, and tested here as they are.

They import nothing of Warpsmith but each other, and every name begins with `_ws_` or `_Ws`, so that they can be pasted
anywhere.
"""
