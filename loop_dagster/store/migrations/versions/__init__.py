"""One module per revision; each runs forward only, inside the transaction of the whole upgrade."""
