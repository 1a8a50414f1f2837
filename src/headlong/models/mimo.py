"""MiMo-7B: the model of Qwen2 with heads of a size of its own. Its MTP head joins the hidden state first."""

from headlong.checkpoint.names import Naming
from headlong.models import qwen2
from headlong.models.dense import decoder_layer
from headlong.models.family import Family
from headlong.models.head_spec import HeadSpec

FAMILY = Family(
    releases="MiMo-7B",
    oracle="transformers' Qwen2, a slow head on its layer",
    config=qwen2.read_config,
    layer=decoder_layer,
    naming=Naming(
        head_layer="mtp_layers.{k}.",
        head_modules={
            "token_layernorm": "pre_fc_norm_embedding",
            "hidden_layernorm": "pre_fc_norm_hidden",
            "input_proj": "fc",
            "final_layernorm": "norm",
        },
    ),
    mtp=HeadSpec(order="hidden_first", joins_in_layers=True, layers_field="num_nextn_predict_layers"),
)
