package lifecycle

import (
	"cmp"
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write the table of waits into docs/failures.md")

// Every state in which a request waits has a bound, and the docs show all of them.
func TestEveryWaitHasABound(t *testing.T) {
	bounded := map[State]bool{Fresh: true, Choosing: true, Redialing: true} // nothing is waited for, or the same as in Calling
	var b strings.Builder
	b.WriteString("| state | where | waits for | at most | what ends it earlier | what follows |\n|---|---|---|---|---|---|\n")
	for _, w := range waits {
		bounded[w.State] = true
		for _, s := range []string{w.For, w.Most, w.Early, w.Then} {
			assert.NotEmpty(t, s, "%+v", w)
		}
		b.WriteString(w.row(stateNames[w.State]))
	}
	for _, w := range passing {
		bounded[w.State] = true
		b.WriteString(w.row("passed through"))
	}
	for s := range states {
		assert.True(t, bounded[s], "state %d has no bound", s)
		assert.NotEmpty(t, stateNames[s])
	}
	const file, begin, end = "../../docs/failures.md", "<!-- waits -->\n", "<!-- end of waits -->\n"
	page, err := os.ReadFile(file)
	require.NoError(t, err)
	before, rest, ok := strings.Cut(string(page), begin)
	require.True(t, ok)
	_, after, ok := strings.Cut(rest, end)
	require.True(t, ok)
	want := before + begin + b.String() + end + after
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(want), 0o644)) //nolint:gosec // a page of the docs
		return
	}
	require.Equal(t, want, string(page), "go test ./gateway/lifecycle -run TestEveryWaitHasABound -update writes it")
}

// A wait is a state in which a request waits for something: for how long at most, what ends the wait earlier, and what follows when the
// time is over. docs/failures.md shows them.
type wait struct {
	State State
	When  string // where only some requests wait in this state
	For   string
	Most  string
	Early string
	Then  string
}

func (w wait) row(state string) string {
	return "| " + strings.Join([]string{state, cmp.Or(w.When, "always"), w.For, w.Most, w.Early, w.Then}, " | ") + " |\n"
}

// passing are the waits of a request that one engine serves alone.
var passing = []wait{
	{State: Calling, For: "the connection", Most: "`limits.connect_timeout`", Early: "client, the engine is drained, shutdown", Then: "another engine"},
	{
		State: Calling, When: "answered in one piece", For: "the whole answer", Most: "`limits.probe_timeout`, and `limits.event_timeout` between two arrivals",
		Early: "client, the engine is drained, shutdown, the connection breaks", Then: "an error: the engine may have died of the request",
	},
	{
		State: Calling, When: "streamed", For: "the first event", Most: "`limits.probe_timeout`",
		Early: "client, the engine is drained, shutdown, the connection breaks", Then: "an error: the engine may have died of the request",
	},
	{State: Answering, When: "streamed", For: "the next event", Most: "`limits.event_timeout`", Early: "client, the engine is drained, shutdown, the connection breaks", Then: "an error event"},
	{State: Answering, When: "streamed", For: "a client that reads", Most: "`limits.write_timeout`", Early: "client", Then: "the answer is ended"},
}

// waits are all waits of a request, in the order in which it comes to them.
var waits = []wait{
	{Placing, "where decode ranks may compute prompts", "the dispatcher's answer", "one round of decisions", "shutdown", "its turn at a prefill engine is waited for"},
	{Queued, "", "its turn at a prefill engine", "`prefill.queue.timeout`", "client, shutdown, no engine left for its model", "503 `queue_timeout`, or the reason"},
	{Forwarded, "", "the answer of another dispatcher", "that dispatcher's waits, and `limits.event_timeout` between events", "client", "it is served here, or gets an error"},
	{Probing, "", "the answer of the prefill engine", "`limits.probe_timeout`", "client (after `limits.probe_grace`), the engine is declared down, halted or drained", "another engine"},
	{Pooled, "for a rank that prefills and decodes", "a slot, and others to share the step of its prompt with", "`pool.ttl`, or `prefill.queue.timeout`; for others `max_hold` of the policy", "client, shutdown, no rank left, another proxy owns the group", "503 `pool_timeout`, or the reason"},
	{Pooled, "", "a slot", "the hold of its hand-off, or `pool.ttl`", "client, shutdown, no rank left, another proxy owns the group", "503 `pool_timeout`, or the reason"},
	{Opening, "", "the first event", "`first_event_timeout`, counted from its slot, and only while its KV is certainly kept ([above](#an-engine-that-stands-still))", "the connection breaks; of a request that pulls nothing, the client", "another prefill, another rank"},
	{Opening, "on a rank that prefills and decodes", "the first event", "`limits.probe_timeout`", "client, the connection breaks, the engine is drained; after `first_event_timeout` and 16 times the predicted time: its core gives no sign of life for `first_event_timeout`, and another group can take the request", "another rank"},
	{Opening, "in one piece, as in coupled", "the whole answer", "`limits.probe_timeout`, then as long as its rank gives signs of life within `limits.event_timeout`; in all 1 s more for each token that it may have", "the connection breaks; of a request that pulls nothing, the client", "another prefill, another rank"},
	{Coupled, "`ascend-layerwise`, before the callback", "the address for the KV, from the decode engine", "`bind.callback_timeout`", "client, the decode leg ends", "bound anew"},
	{Coupled, "", "the first event", "`limits.probe_timeout` for the prefill, then `first_event_timeout`, with `nixl-push` only until the lease ends", "one leg ends the other; the client, at once or after 5 s", "bound anew"},
	{Coupled, "`ascend-layerwise`, left by its client before the callback", "a late callback", "5 s", "the callback", "a prefill that nobody waits for, because only its end frees the decode engine's blocks"},
	{Coupled, "left by its client", "the end of the prefill leg", "5 s", "the leg ends", "the slot is free; where the engine keeps blocks, their room counts as lost"},
	{Coupled, "`sglang`, after the first token", "the prefill engine's answer", "100 ms", "the answer comes", "the token goes out"},
	{Pausing, "", "the pause before another attempt", "the engine's `Retry-After`, up to 5 s, and `prefill.retry.base`, doubled with each failure", "client", "the next attempt"},
	{Offering, "where there are other dispatchers", "the answer whether one of them should have it", "no time: what is known of them decides", "–", "it goes there, or gets its error"},
	{Answering, "", "the next event", "`limits.event_timeout`", "client, a drain's deadline, the connection breaks", "the answer goes on elsewhere, or ends with an error event"},
	{Answering, "", "a client that reads", "`limits.write_timeout`", "client", "the answer is ended"},
	{Confirming, "`sglang`, with the whole answer; its slot is free", "the prefill engine's confirmation", "5 s", "client, the prefill leg ends, its engine is declared down or drained", "an error in place of the end"},
	{Lost, "", "a client that takes what came so far", "`limits.write_timeout`", "client", "it goes on elsewhere, or ends with an error event"},
	{Lost, "`sglang`", "the prefill engine's confirmation of what came so far", "5 s", "client, the prefill leg ends, its engine is declared down or drained", "an error event"},
	{Done, "left by its client", "the decode engine to close its side", "250 ms", "the engine closes it", "the slot is free"},
	{Done, "", "the end of the engine's body", "the limits of the stream", "that", "the connection is used again, or closed"},
	{Done, "with a hand-off that is not used", "a rank that pulls it and throws it away", "the hold", "shutdown", "the engine frees it at the hold timeout"},
}

var stateNames = [states]string{"fresh", "placing", "queued", "abroad", "probing", "pooled", "opening", "coupled", "pausing", "offering", "answering", "confirming", "lost", "choosing", "calling", "redialing", "done"}
