"""The gateway: calls to models passed on byte for byte, and recorded beside (docs/gateway.md).

Belongs here: which server answers, passing on, reading what was asked and answered, and the recorder. Does not belong
here: addresses (routers/gateway.py), the registry's part (store/capturing.py), answering for live versions (models/).

The way of a call:

    calls.py      who calls, and for which model
    upstreams.py  which server answers for the model, and under which headers
    passing.py    on to the server and back, chunk by chunk, while the caller is there
    planning.py   beside it, in a thread: is the call recorded, under which tags and id
    asked.py      the conversation in the body; answers.py the answer, as it comes
    recorder.py   after it, in one thread: store the sample, count what was not stored
"""
