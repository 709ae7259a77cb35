"""Metadata for the three-pool: window rows and entries address tables of their own."""

from __future__ import annotations

from dsv4.metadata.table_builder import TableMetadataBuilder


class ThreePoolMetadataBuilder(TableMetadataBuilder):
    """Entry rows start at 0: `geometry.entry_base` is 0 in this family."""
