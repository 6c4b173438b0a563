"""The states of a transfer, the same for sender and receiver.

::

                    sender                                   receiver
    BOOTSTRAPPING       Offer sent, nothing granted              nothing offered yet
         ▼ Grant                                  ▼ Offer
    WAITING_FOR_INPUT   granted, rows not encoded yet            offered, no block granted yet
         ▼ rows exist                             ▼ Grant sent
    TRANSFERRING        rows are being written, grant by grant   rows land and are consumed, grant by grant
         ▼ Done received                          ▼ last row consumed, Done sent
    SUCCESS             rows are let go                          blocks are back in the pool

    FAILED              from any state: aborted by either end, or the peer is gone
"""

import enum


class TransferState(enum.Enum):
    """Where a transfer stands; the names are the field's."""

    BOOTSTRAPPING = "bootstrapping"
    WAITING_FOR_INPUT = "waiting for input"
    TRANSFERRING = "transferring"
    SUCCESS = "success"
    FAILED = "failed"
