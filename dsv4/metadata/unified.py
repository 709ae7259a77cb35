"""Metadata for the unified pool: both segments address one table per layer, entries behind the window rings."""

from __future__ import annotations

from dsv4.metadata.table_builder import TableMetadataBuilder


class UnifiedMetadataBuilder(TableMetadataBuilder):
    """Entry rows start at `geometry.entry_base`, the first row behind all window rings."""
