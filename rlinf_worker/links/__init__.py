"""Links: the data plane's point-to-point connections between two workers, and the codec of what travels on them.

For: the channel and weight layers above, which multiplex many routes on one link (`listener`).
Not for: deciding who talks to whom (the driver does), acknowledgement, redelivery, order across links (channels do).

    payload   nested values with arrays <-> one small header + buffers        message   what a link carries
    payload_arrays   what of that has to do with numpy, torch and GPUs
    link      what all links owe     errors      settings                     hello     who is at the other end
    frame     one message as bytes      ring      SPSC bytes in shared memory       areas     memory to receive into
    shm       same pod, over segments
    tcp       between pods (wire reads; large buffers go beside it by a lane, which the door lets in)
    beside    GPU buffers beside a link; devices has the rules, meet_gpus chooses, cuda (IPC) and nccl move them
    endpoint  where a worker is reached      listener   Listener, dial: the cheapest link that both ends share
"""
