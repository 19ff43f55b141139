"""Steps of vision models of ``transformers``: classification, detection, segmentation, image and text."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from memfix.meters.base import Step, StepBuilder

from .training import padded, tokens, train, transformer

_SMALL: dict[str, Any] = {
    "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 3,
}  # fmt: skip


def classifier(name: str, device: str, **settings: Any) -> Step:
    model = transformer(name, "ForImageClassification", num_labels=10, **settings)
    batch = {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.randint(0, 10, (4,))}
    return train(model, batch, device)


def detr(device: str) -> Step:
    """Build a step that trains DETR, which matches boxes to objects on the CPU, by costs that the model computes."""
    from transformers import ResNetConfig

    model = transformer(
        "Detr", "ForObjectDetection", use_timm_backbone=False, use_pretrained_backbone=False, backbone=None,
        backbone_config=ResNetConfig(out_features=["stage4"]), encoder_layers=2, decoder_layers=2, num_queries=50,
        num_labels=10,
    )  # fmt: skip
    objects = [{"class_labels": torch.tensor([1, 2, 5]), "boxes": torch.rand(3, 4)} for _ in range(2)]
    return train(model, {"pixel_values": torch.randn(2, 3, 256, 256), "labels": objects}, device)


def segformer(device: str) -> Step:
    model = transformer("Segformer", "ForSemanticSegmentation", num_labels=10)
    batch = {"pixel_values": torch.randn(2, 3, 128, 128), "labels": torch.randint(0, 10, (2, 128, 128))}
    return train(model, batch, device)


def clip(device: str) -> Step:
    text = {**_SMALL, "vocab_size": 8000, "projection_dim": 128, "eos_token_id": 2}
    vision = {**_SMALL, "projection_dim": 128}
    model = transformer("CLIP", "Model", text_config=text, vision_config=vision, projection_dim=128)
    batch = {
        "input_ids": tokens(8, 64, 8000), "attention_mask": padded(8, 64), "pixel_values": torch.randn(8, 3, 224, 224),
        "return_loss": True,
    }  # fmt: skip
    return train(model, batch, device)


def vit_mae(device: str) -> Step:
    """Build a step that trains a masked autoencoder, which reconstructs randomly masked patches."""
    model = transformer(
        "ViTMAE", "ForPreTraining", **_SMALL, decoder_hidden_size=128, decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4, decoder_intermediate_size=256,
    )  # fmt: skip
    return train(model, {"pixel_values": torch.randn(4, 3, 224, 224)}, device)


STEPS: dict[str, tuple[str, StepBuilder]] = {
    name: ("transformers", build)
    for name, build in {
        "ViT, classification": partial(classifier, "ViT", **_SMALL),
        "DINOv2, classification": partial(classifier, "Dinov2", **_SMALL, drop_path_rate=0.1),
        "Swin, classification": partial(classifier, "Swin", embed_dim=48, depths=[2, 2], num_heads=[3, 6]),
        "ConvNeXt, classification": partial(
            classifier, "ConvNext", hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 2, 1]
        ),
        "DETR, train step": detr,
        "SegFormer, train step": segformer,
        "CLIP, contrastive": clip,
        "ViT-MAE, pretraining": vit_mae,
    }.items()
}
