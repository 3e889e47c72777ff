"""The repairs by rule, in the order in which they are tried."""

from collections.abc import Callable

from bootfile.fix import repairs_epochs, repairs_files, repairs_numbers, repairs_state, repairs_steps
from bootfile.fix.checkpoint import Job

# a repair plans edits, or raises CannotEdit: what is written first, then what is in it, then when
REPAIRS: dict[str, Callable[[Job], None]] = {
    "R503": repairs_files.write_on_rank_0,
    "R501": repairs_files.write_whole,
    "R502": repairs_files.choose_by_number,
    "R506": repairs_files.read_whole,
    "R601": repairs_files.rename_entries,
    "R101": repairs_state.save_object,
    "R103": repairs_state.save_object,
    "R104": repairs_state.save_object,
    "R105": repairs_state.save_object,
    "R109": repairs_state.save_object,
    "R106": repairs_state.save_object,
    "R201": repairs_state.load_object,
    "R301": repairs_epochs.shift_start,
    "R302": repairs_epochs.restore_start,
    "R107": repairs_numbers.save_number,
    "R108": repairs_numbers.save_number,
    "R305": repairs_epochs.seed_order,
    "R307": repairs_epochs.set_epoch,
    "R308": repairs_epochs.vary_epoch,
    "R402": repairs_epochs.sort_listing,
    "R401": repairs_state.save_random,
    "R602": repairs_steps.save_after_step,
    "R801": repairs_steps.save_at_sigterm,
}
