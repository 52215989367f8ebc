package life

// A Wait is a state in which a request waits for something: for how long at most, what ends the wait earlier, and what follows when the
// time is over. docs/failures.md shows them.
type Wait struct {
	State State
	When  string // where only some requests wait in this state
	For   string
	Most  string
	Early string
	Then  string
}

// Waits are all waits of a request, in the order in which it comes to them.
var Waits = []Wait{
	{Placing, "where decode ranks may compute prompts", "the dispatcher's answer", "one round of decisions", "shutdown", "its turn at a prefill engine is waited for"},
	{Queued, "", "its turn at a prefill engine", "`prefill.queue.timeout`", "client, shutdown, no engine left for its model", "503 `queue_timeout`, or the reason"},
	{Abroad, "", "the answer of another dispatcher", "that dispatcher's waits, and `limits.event_timeout` between events", "client", "it is served here, or gets an error"},
	{Probing, "", "the answer of the prefill engine", "`limits.probe_timeout`", "client (after `limits.probe_grace`), the engine is declared down or drained", "another engine"},
	{Pooled, "", "a slot", "the hold of its hand-off, or `pool.ttl`", "client, shutdown, no rank left, another proxy owns the group", "503 `pool_timeout`, or the reason"},
	{Opening, "", "the first event", "`first_event_timeout`, counted from its slot, and only while its KV is certainly kept ([above](#an-engine-that-stands-still))", "the connection breaks; of a request that pulls nothing, the client", "another prefill, another rank"},
	{Coupled, "`ascend-layerwise`, before the callback", "the address for the KV, from the decode engine", "`bind.callback_timeout`", "client, the decode leg ends", "bound anew"},
	{Coupled, "", "the first event", "`limits.probe_timeout` for the prefill, then `first_event_timeout`, with `nixl-push` only until the lease ends", "one leg ends the other; the client, at once or after `bind.grace`", "bound anew"},
	{Coupled, "left by its client", "the end of the prefill leg", "`bind.grace`", "the leg ends", "the slot is free; where the engine keeps blocks, their room counts as lost"},
	{Coupled, "`sglang`, after the first token", "the prefill engine's answer", "`bind.confirm`", "the answer comes", "the token goes out"},
	{Pausing, "", "the pause before another attempt", "the engine's `Retry-After`, up to 5 s, and `prefill.retry.base`, doubled with each failure", "client", "the next attempt"},
	{Offering, "where there are other dispatchers", "the answer whether one of them should have it", "no time: what is known of them decides", "–", "it goes there, or gets its error"},
	{Answering, "", "the next event", "`limits.event_timeout`", "client, a drain's deadline, the connection breaks", "the answer goes on elsewhere, or ends with an error event"},
	{Answering, "", "a client that reads", "`limits.write_timeout`", "client", "the answer is ended"},
	{Answering, "`sglang`, with the whole answer; its slot is free", "the prefill engine's confirmation", "`bind.grace`", "client, the prefill leg ends, its engine is declared down or drained", "an error in place of the end"},
	{Done, "left by its client", "the decode engine to close its side", "250 ms", "the engine closes it", "the slot is free"},
	{Done, "", "the end of the engine's body", "the limits of the stream", "that", "the connection is used again, or closed"},
	{Done, "with a hand-off that is not used", "a rank that pulls it and throws it away", "the hold", "shutdown", "the engine frees it at the hold timeout"},
}

var stateNames = [states]string{"fresh", "placing", "queued", "abroad", "probing", "pooled", "opening", "coupled", "pausing", "offering", "answering", "done"}

func (s State) String() string { return stateNames[s] }
