package lifecycle

import (
	"cmp"
	"flag"
	"os"
	"slices"
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
	limited := map[State][]Timeout{}
	for i, w := range slices.Concat(waits, passing) {
		for _, l := range w.Until {
			require.Contains(t, w.Most, "{}", "%+v", w)
			w.Most = strings.Replace(w.Most, "{}", l.String(), 1)
			limited[w.State] = append(limited[w.State], l)
		}
		bounded[w.State] = true
		for _, s := range []string{w.For, w.Most, w.Early, w.Then} {
			assert.NotEmpty(t, s, "%+v", w)
		}
		name := stateNames[w.State]
		if i >= len(waits) {
			name = "passed through"
		}
		b.WriteString(w.row(name))
	}
	for s := range states {
		assert.True(t, bounded[s], "state %d has no bound", s)
		assert.NotEmpty(t, stateNames[s])
	}
	for state, said := range saidLimits(t) {
		for l := range said {
			assert.Contains(t, limited[state], l, "the table does not have %s of state %s", l, stateNames[state])
		}
		for _, l := range limited[state] {
			assert.True(t, said[l], "nothing is limited by %s in state %s", l, stateNames[state])
		}
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

// A wait is a state in which a request waits for something: for how long at most, what ends the
// wait earlier, and what follows when the time is over. docs/failures.md shows them.
type wait struct {
	State State
	When  string // where only some requests wait in this state
	For   string
	Most  string    // {} stands for a limit
	Until []Timeout // those that the life says, in their order in Most
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
		State: Calling, When: "answered in one piece", For: "the whole answer", Most: "{}, and `limits.event_timeout` between two arrivals",
		Until: []Timeout{ByProbe},
		Early: "client, the engine is drained, shutdown, the connection breaks", Then: "an error: the engine may have died of the request",
	},
	{
		State: Calling, When: "streamed", For: "the first event", Most: "{}", Until: []Timeout{ByProbe},
		Early: "client, the engine is drained, shutdown, the connection breaks", Then: "an error: the engine may have died of the request",
	},
	{State: Streaming, When: "streamed", For: "the next event", Most: "`limits.event_timeout`", Early: "client, the engine is drained, shutdown, the connection breaks", Then: "an error event"},
	{State: Streaming, When: "streamed", For: "a client that reads", Most: "`limits.write_timeout`", Early: "client", Then: "the answer is ended"},
}

// waits are all waits of a request, in the order in which it comes to them.
var waits = []wait{
	{State: TryingLocal, When: "where decode ranks may compute prompts", For: "the dispatcher's answer", Most: "one round of decisions", Early: "shutdown", Then: "its turn at a prefill engine is waited for"},
	{State: Queued, For: "its turn at a prefill engine", Most: "`prefill.queue.timeout`", Early: "client, shutdown, no engine left for its model", Then: "503 `queue_timeout`, or the reason"},
	{State: Forwarded, For: "the answer of another dispatcher", Most: "that dispatcher's waits, and `limits.event_timeout` between events", Early: "client", Then: "it is served here, or gets an error"},
	{State: Prefilling, For: "the answer of the prefill engine", Most: "{}", Until: []Timeout{ByProbe}, Early: "client (after `limits.probe_grace`), the engine is declared down, halted or drained", Then: "another engine"},
	{State: Pooled, When: "for a rank that prefills and decodes", For: "a slot, and others to share the step of its prompt with", Most: "`pool.ttl`, or `prefill.queue.timeout`; for others `max_hold` of the policy", Early: "client, shutdown, no rank left, another proxy owns the group", Then: "503 `pool_timeout`, or the reason"},
	{State: Pooled, For: "a slot", Most: "the hold of its hand-off, or `pool.ttl`", Early: "client, shutdown, no rank left, another proxy owns the group", Then: "503 `pool_timeout`, or the reason"},
	{State: Transferring, For: "the first event", Most: "{}, and only while its KV is certainly kept ([the rule](connectors.md#how-long-kv-is-believed))", Until: []Timeout{ByFirstEvent}, Early: "the connection breaks; of a request that pulls nothing, the client", Then: "another prefill, another rank"},
	{State: Transferring, When: "on a rank that prefills and decodes", For: "the first event", Most: "{}", Until: []Timeout{ByProbe}, Early: "client, the connection breaks, the engine is drained, or is halted or down while another can do its work; after `first_event_timeout` and 16 times the predicted time: its core gives no sign of life for `first_event_timeout`, and another group can take the request", Then: "another rank"},
	{State: Transferring, When: "in one piece, as in coupled", For: "the whole answer", Most: "{}", Until: []Timeout{ByWhole}, Early: "the connection breaks; the client, if KV is pulled after `first_event_timeout`", Then: "another prefill, another rank"},
	{State: Coupled, When: "`ascend-layerwise`, before the callback", For: "the address for the KV, from the decode engine", Most: "{}", Until: []Timeout{ByCallback}, Early: "client, the decode leg ends", Then: "bound anew"},
	{State: Coupled, For: "the first event", Most: "{} for the prefill, then {}; in one piece {}", Until: []Timeout{ByProbe, ByFirstEvent, ByWhole}, Early: "one leg ends the other; the client, at once or after 5 s", Then: "bound anew"},
	{State: Coupled, When: "`ascend-layerwise`, left by its client before the callback", For: "a late callback", Most: "5 s", Early: "the callback", Then: "a prefill that nobody waits for, because only its end frees the decode engine's blocks"},
	{State: Coupled, When: "left by its client", For: "the end of the prefill leg", Most: "{}", Until: []Timeout{ByGrace}, Early: "the leg ends", Then: "the slot is free; where the engine keeps blocks, their room counts as lost"},
	{State: Coupled, When: "`sglang`, after the first token", For: "the prefill engine's answer", Most: "{}", Until: []Timeout{ByConfirm}, Early: "the answer comes", Then: "the token goes out"},
	{State: Coupled, When: "`sglang`, whose decode engine has died", For: "the end of the prefill leg, which was told to end", Most: "{}", Until: []Timeout{ByGrace}, Early: "the prefill engine answers that it has ended the request", Then: "bound anew"},
	{State: Pausing, For: "the pause before another attempt", Most: "the engine's `Retry-After`, up to 5 s, and `prefill.retry.base`, doubled with each failure", Early: "client", Then: "the next attempt"},
	{State: Offering, When: "where there are other dispatchers", For: "the answer whether one of them should have it", Most: "no time: what is known of them decides", Early: "–", Then: "it goes there, or gets its error"},
	{State: Streaming, For: "the next event", Most: "`limits.event_timeout`", Early: "client, a drain's deadline, the connection breaks", Then: "the answer goes on elsewhere, or ends with an error event"},
	{State: Streaming, For: "a client that reads", Most: "`limits.write_timeout`", Early: "client", Then: "the answer is ended"},
	{State: Confirming, When: "`sglang`, with the whole answer; its slot is free", For: "the prefill engine's confirmation", Most: "{}", Until: []Timeout{ByGrace}, Early: "client, the prefill leg ends, its engine is declared down or drained", Then: "an error in place of the end"},
	{State: Lost, For: "a client that takes what came so far", Most: "`limits.write_timeout`", Early: "client", Then: "it goes on elsewhere, or ends with an error event"},
	{State: Lost, When: "`sglang`", For: "the prefill engine's confirmation of what came so far", Most: "{}", Until: []Timeout{ByGrace}, Early: "client, the prefill leg ends, its engine is declared down or drained", Then: "an error event"},
	{State: Done, When: "left by its client", For: "the decode engine to close its side", Most: "250 ms", Early: "the engine closes it", Then: "the slot is free"},
	{State: Done, For: "the end of the engine's body", Most: "the limits of the stream", Early: "that", Then: "the connection is used again, or closed"},
	{State: Done, When: "with a hand-off that is not used", For: "a rank that pulls it and throws it away", Most: "the hold", Early: "shutdown", Then: "the engine frees it at the hold timeout"},
}

var stateNames = [states]string{"fresh", "placing", "queued", "forwarded", "prefilling", "pooled", "transferring", "coupled", "pausing",
	"offering",
	"streaming", "confirming", "lost", "choosing", "calling", "redialing", "done"}

// saidLimits are the limits that lives say of each script, dialect and shape of an answer, by the
// state in which they wait. What legs that run beside each other wait for counts as the state in
// which both are under way.
func saidLimits(t *testing.T) map[State]map[Timeout]bool {
	said := map[State]map[Timeout]bool{Calling: {}}
	var passed Lifecycle
	passed.Step(Event{Kind: Begun, Bind: Passthrough}, nil)
	for _, x := range passed.Step(Event{Kind: Chosen}, nil) {
		said[Calling][x.Until] = true
	}
	w := readWords(t)
	for _, script := range []string{"Late", "Early Traits.CallsBack", "Early Traits.Aborts", "Aggregated"} {
		for _, whole := range []string{"", " NoEarlyEvents", " NoEarlyEvents MayIgnoreAbort"} {
			turn := "Begun; NoLocal; Turn Bind=" + script
			for _, rest := range []string{
				"HandedOver; Bound; First; CallFailed End.Call=Decode End.Progress=Through End.Reason=Broke",
				"Bound; First; Ends",
				"Bound; First; CallFailed End.Call=Decode End.Progress=Through End.Reason=Broke",
				"Bound; CalledBack Pair=1; ProbeDue Pair=1; PrefillFailed Pair=1 Again End.Progress=Headed End.Reason=Busy",
				"Bound; ProbeDue Pair=1; PrefillDone Pair=1; Began Pair=1",
				"Bound; ProbeDue Pair=1; Began Pair=1; ClientGone Pair=1",
				"Bound; ProbeDue Pair=1; ClientGone Pair=1",
				"Bound; ProbeDue Pair=1; DecodeFailed Pair=1 Reason=Died",
				"Bound; ClientGone Pair=1; DecodeFailed Pair=1 Reason=Died; CalledLate Pair=1",
			} {
				var l Lifecycle
				for text := range strings.SplitSeq(turn+"; "+strings.ReplaceAll(rest, "Bound", "Bound"+whole), "; ") {
					var e Event
					if w.set(t, text, &e); e.Pair > len(l.pairs) {
						break
					}
					for _, x := range l.Step(e, nil) {
						at := l.state
						if x.Pair > 0 {
							at = Coupled
						}
						if x.Until != NoTimeout {
							if said[at] == nil {
								said[at] = map[Timeout]bool{}
							}
							said[at][x.Until] = true
						}
					}
				}
			}
		}
	}
	return said
}
