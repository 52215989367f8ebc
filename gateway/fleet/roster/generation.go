package roster

import "strings"

// A decode engine that asks an address for KV which the engine there no longer has could get blocks
// of another prompt, or wait. So each hand-off carries the generation of its engine's address,
// which was read before the prefill call was written, and any doubt whether the engine still has
// the KV begins another generation. Where a hand-off of another generation is taken, the prompt is
// prefilled again. A doubt that was wrong costs no more than that.

// Generation identifies the KV that an engine made between two doubts.
type Generation struct {
	Key    string
	Number uint64 // no number is used twice; 0: no engine was at the address
}

type generation struct {
	number     uint64
	goneBefore uint64  // KV of smaller numbers is proven gone
	start      float64 // latest of a process, in Unix seconds; 0: not known
	engineID   string  // that hand-offs of this generation name; empty: none has
	refused    bool    // the last connection was refused
}

// What puts KV in doubt, as text for people.
const (
	evidenceStart    = "its process has another start time"
	evidenceAddress  = "its name has another address"
	evidenceRefused  = "a connection was refused"
	evidenceEngineID = "its hand-offs name another engine; if several engines share its address, set shared_address in its profile"
)

// restarted: an earlier start time was read before, and proves nothing.
func (g *generation) restarted(start float64) bool { return g.start != 0 && start > g.start }

// withoutRank returns an engine id without the number of a rank, so that it identifies the engine's
// process. vLLM builds the id of a data parallel rank from an id that all its ranks share, _dp and
// the rank's number (0.32.0, v1/engine/core.py).
func withoutRank(id string) string {
	base := strings.TrimRight(id, "0123456789")
	if before, ok := strings.CutSuffix(base, "_dp"); ok && base != id {
		return before
	}
	return id
}
