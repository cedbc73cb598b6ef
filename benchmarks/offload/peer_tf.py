"""A consumer of tf.data service: dispatcher and one worker in processes of their own, over loopback.

The transform is one that its users would write: TensorFlow's own operations, since Python functions cannot
travel to its workers.
"""

from __future__ import annotations

import atexit
import math
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf
from peer_serving import move, options, serve
from photo import ASPECTS, BATCH, LEAST_AREA, PIXELS

SERVER = """
import sys, tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
service = tf.data.experimental.service
if sys.argv[1] == "dispatcher":
    server = service.DispatchServer(service.DispatcherConfig(port=0))
    print(server.target.partition("://")[2], flush=True)
else:
    server = service.WorkerServer(service.WorkerConfig(dispatcher_address=sys.argv[2]))
    print("ready", flush=True)
server.join()
"""


def started(*words: str) -> str:
    """Start a server; what it says once it is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, *words], stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.kill)
    assert process.stdout is not None
    return process.stdout.readline().strip()


def decoded(path: Any) -> Any:
    """A JPEG file decoded, and a random part of it resized: uint8."""
    image = tf.io.decode_jpeg(tf.io.read_file(path), channels=3, dct_method="INTEGER_ACCURATE")
    height, width = tf.unstack(tf.cast(tf.shape(image)[:2], tf.float32))
    area = tf.random.uniform([], LEAST_AREA, 1.0) * width * height
    low, high = (math.log(side) for side in ASPECTS)
    aspect = tf.exp(tf.random.uniform([], low, high))
    wide = tf.minimum(tf.sqrt(area * aspect), width)
    tall = tf.minimum(tf.sqrt(area / aspect), height)
    left = tf.random.uniform([]) * (width - wide)
    top = tf.random.uniform([]) * (height - tall)
    begin = tf.cast(tf.stack([top, left, 0.0]), tf.int32)
    size = tf.cast(tf.stack([tall, wide, 3.0]), tf.int32)
    part = tf.slice(image, begin, tf.maximum(size, 1))
    return tf.cast(tf.image.resize(part, (PIXELS, PIXELS), antialias=True), tf.uint8)


def batches(photos: Path) -> Iterator[Any]:
    """Images of batches without end."""
    address = started("dispatcher")
    started("worker", address)
    files = [str(path) for path in sorted(photos.glob("*.jpg"))]
    data = tf.data.Dataset.from_tensor_slices(files).repeat().shuffle(len(files))
    data = data.map(decoded).batch(BATCH)
    service = tf.data.experimental.service.distribute(
        processing_mode=tf.data.experimental.service.ShardingPolicy.OFF, service=f"grpc://{address}"
    )
    move(0)
    yield from data.apply(service).prefetch(2).as_numpy_iterator()


def main() -> None:
    """Serve blocks until the socket closes."""
    asked = options()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    serve(asked.socket, partial(batches, asked.photos), f"TensorFlow {tf.__version__}")


if __name__ == "__main__":
    main()
