"""Messages with contents of any length between a trainer and the peers that serve its stages."""

import threading
from collections.abc import Sequence

from muster.launch.peers.channel import Channel, Message
from muster.launch.peers.links import receive_parts, split


class Packets:
    """Connection that carries messages, each followed by its contents. Any thread may send, one receives."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._sending = threading.Lock()

    def send(self, message: Message, contents: Sequence[bytes] = ()) -> None:
        """Send a message and its contents. Raises OSError."""
        with self._sending:
            self.channel.send_message(message | {"sizes": [len(content) for content in contents]})
            for content in contents:
                for part in split(content):
                    self.channel.send(part)

    def receive(self) -> tuple[Message, list[bytes]]:
        """Return the next message and its contents. Raises OSError or RefusedError."""
        message = self.channel.receive_message()
        return message, [receive_parts(self.channel, int(size)) for size in message.pop("sizes", ())]

    def close(self) -> None:
        """End the connection."""
        self.channel.close()
