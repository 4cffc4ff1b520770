"""Run by openpi-client's own interpreter (numpy below 2): drives a server as openpi's LIBERO example does and prints what it saw.

Arguments: URL. Prints one JSON document. Imports nothing of ours.
"""

import json
import sys

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy


def element(number, prompt):
    """An observation with the keys and dtypes of openpi's `examples/libero/main.py`."""
    return {
        "observation/image": np.full((64, 64, 3), number, np.uint8),
        "observation/wrist_image": np.zeros((64, 64, 3), np.uint8),
        "observation/state": np.full(8, number, np.float64),
        "prompt": prompt,
    }


client = WebsocketClientPolicy(sys.argv[1])
answers = [client.infer(element(number, "reach")) for number in (3, 4)]
try:
    client.infer(element(5, "wrong"))
    error = ""
except RuntimeError as caught:
    error = str(caught)
after = WebsocketClientPolicy(sys.argv[1]).infer(element(6, "reach"))
print(
    json.dumps(
        {
            "numpy": np.__version__,
            "metadata": client.get_server_metadata(),
            "actions": [answer["actions"].tolist() for answer in answers],
            "dtype": str(answers[0]["actions"].dtype),
            "keys": [sorted(answer) for answer in answers],
            "timing": [sorted(answer["server_timing"]) for answer in answers],
            "error": error,
            "after": after["actions"][0][0].item(),
        }
    )
)
