"""An S3 server on loopback, as an object store behaves that this project supports."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from moto.moto_server import threaded_moto_server
from moto.server import ThreadedMotoServer


class _OneAtATime(threaded_moto_server.DomainDispatcherApplication):
    """A store's conditional put is one act; this server looks and writes in two, so it takes one call at a time."""

    _turn = threading.Lock()

    def __call__(self, environ: Any, start_response: Any) -> Any:
        with self._turn:
            return list(super().__call__(environ, start_response))


@contextmanager
def running(bucket: str) -> Iterator[dict[str, str]]:
    """A server with an empty bucket; gives the storage options that reach it. Servers of one process share buckets."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threaded_moto_server, "DomainDispatcherApplication", _OneAtATime)
        server.start()
    host, port = server.get_host_and_port()
    options = {
        "aws_endpoint_url": f"http://{host}:{port}",
        "aws_region": "us-east-1",
        "aws_access_key_id": "k",
        "aws_secret_access_key": "s",
        "aws_allow_http": "true",
    }
    try:
        boto3.client(
            "s3",
            endpoint_url=options["aws_endpoint_url"],
            region_name=options["aws_region"],
            aws_access_key_id=options["aws_access_key_id"],
            aws_secret_access_key=options["aws_secret_access_key"],
        ).create_bucket(Bucket=bucket)
        yield options
    finally:
        server.stop()
