"""Hyper-connections whose mixes are computed by one native call: twenty rounds of sums of four numbers are many calls
of torch's."""

from torch import Tensor

from headlong.ops import native
from headlong.ops.hyper_connection.reference import ReferenceHyperConnection


class NativeHyperConnection(ReferenceHyperConnection):
    """The connections of one block, in float32."""

    name = "native"

    def mixes(self, raw_NM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s, count = self.sizes, len(raw_NM)
        pre_NS, post_NS = (raw_NM.new_empty(count, s.num_streams) for _ in range(2))
        comb_NSS = raw_NM.new_empty(count, s.num_streams, s.num_streams)
        native.kernel("headlong_stream_mixes")(
            native.address(raw_NM),
            native.address(self._scale_M),
            native.address(self._base_M),
            pre_NS.data_ptr(),
            post_NS.data_ptr(),
            comb_NSS.data_ptr(),
            count,
            s.num_streams,
            s.iterations,
            s.eps,
            native.num_threads(),
        )
        return pre_NS, post_NS, comb_NSS
