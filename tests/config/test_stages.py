"""Which layers a stage has."""

from aligner.config.sections.model.stages import cut


def sizes(*args) -> list[int]:
    return [len(layers) for layers in cut(*args)]


def test_layers_that_stages_do_not_divide_are_fewest_on_the_first_and_the_last():
    """As NeMo-RL cuts DeepSeek-V3 (3, 14 x 4, 2 of 61) and Qwen3-235B (11, 6 x 12, 11 of 94)."""
    assert sizes(61, 16) == [3, 3] + 13 * [4] + [3] and sizes(94, 8) == [11] + 6 * [12] + [11]
    for layers in range(1, 14):
        for stages in range(1, layers + 1):
            pieces = cut(layers, stages)
            assert [layer for piece in pieces for layer in piece] == list(range(layers))
            assert {len(piece) for piece in pieces} <= {layers // stages, -(-layers // stages)}
            assert len(pieces[0]) == len(pieces[-1]) == layers // stages or layers % stages > stages - 2


def test_no_stage_begins_with_a_layer_that_uses_another_ones_choice():
    glm = tuple(layer for layer in range(78) if layer > 2 and layer % 4 != 2)  # GLM-5.2's
    assert sizes(78, 4, (), glm) == [18, 20, 20, 20]
    for layers, shared in ((78, glm), (4, (1, 3)), (8, (5, 6, 7)), (10, (1, 2, 3, 4, 5, 6))):
        for stages in range(1, layers - len(shared) + 1):
            pieces = cut(layers, stages, (), shared)
            assert all(piece and piece[0] not in shared for piece in pieces)
            assert [layer for piece in pieces for layer in piece] == list(range(layers))


def test_sizes_as_given_and_even_for_a_model_of_another_depth():
    assert cut(61, 4, (13, 16, 17, 15)) == (range(13), range(13, 29), range(29, 46), range(46, 61))
    assert sizes(4, 2, (13, 48)) == sizes(4, 2, (4,)) == [2, 2]
