// Package lifecycle is the life of a request as a value: how far it has come, what it holds, what becomes of that when an attempt
// to serve it fails, whether it is tried again, and whose fault the failure is. It knows no clock, socket or engine; gateway/request
// tells it what happens and carries out what it says. lifecycle.go is the place to start reading.
package lifecycle

// A Leg is one half of an attempt to serve a request, or all of it.
type Leg uint8

// The legs.
const (
	Prefill Leg = iota // from the request's turn to the hand-off of its KV
	Decode             // from the hand-off to the first event of the answer. It is the only leg of a request that has no hand-off
	Sole               // of a request that one engine serves alone, and that is not counted on a decode rank
)

// Far is how far a leg had come when it ended.
type Far uint8

// How far.
const (
	Unsent  Far = iota // no byte of the request was written to the engine
	Sent               // the engine may have the request
	Headed             // the engine's answer has begun
	Through            // the KV is where it belongs: the prefill engine has handed it over, or the decode engine has read it
)

// Why is why a leg ended without its result.
type Why uint8

// The reasons. Those before Stale do not count as a failure of the leg's engine (see OfEngine).
const (
	Left        Why = iota // the client left
	Leaving                // the proxy has no time for it any more
	Unready                // the proxy does not listen where engines would call it
	Moved                  // its engine was taken out of service
	HungUp                 // we ended the call, for another reason
	NotOurs                // another proxy admits to the engine now
	Unowned                // another proxy admits to the whole decode group now
	NoRank                 // the pool had no rank for it in time, or will have none
	RanksLost              // the region of its hand-off has no rank any more
	Unlearned              // it is not known at which address decode engines reach the prefill engine
	Outlived               // the prefill engine's process is another one, and its KV is gone
	MayOutlive             // the prefill engine's process may be another one
	Expired                // its slot came when the hand-off was too old to be sent, or the KV that a prefill engine was to fetch is gone
	Disbelieved            // its KV may have been another prompt's when it was read
	Ignored                // the engine did not go on from the answer so far
	TooLong                // the engine counted more tokens than its model takes

	// In the reasons from here on, the leg's engine is why the leg ended.
	Stale       // a connection that had been kept alive ended before it brought one byte of the answer
	Unreachable // no connection could be made
	Broke       // the connection broke, or the engine was declared down while a probe was under way
	Silent      // the engine said nothing for too long
	Garbled     // what it said cannot be used
	TooLarge    // its answer is larger than it may be
	Unnamed     // its bootstrap server does not say under which name it has the KV
	Bare        // its answer has no hand-off
	Empty       // as Bare, because the first token is the end of the answer
	Restarted   // its process is not the one whose address the decode engine has
	Uncalled    // it did not say in time where the KV goes
	Misplaced   // it named a place that KV may not go to
	Unbegun     // the prompt was prefilled, and it did not begin its answer
	Stuck       // the rank also computes the prompt, took many times as long as predicted, and gave no sign of life
	Unusable    // no answer can be made of what it said, or the answer is too large
	Unconfirmed // it did not say in time whether the KV is complete
	Incomplete  // it broke off while it handed the KV over

	// These are statuses of its answer, or of an event that says that it failed.
	Lacks     // 404 or 405 of its router: it does not have the endpoint
	Rejected  // 4xx: the request is refused
	Throttled // 429
	Busy      // 503
	Failed    // 500, which is the engine's fault or the request's
	Erred     // 502, 504, or an event that has no status
	Unable    // 501
	Odd       // any other status
	GivenBack // the engine ran out of KV memory and gave the request back
	Withheld  // the engine takes no requests while its group re-forms, or none for this rank any more: it read nothing of the request
	// 404, because the engine does not have the model that the request names, though its list had it: it read nothing else of the request
	Unlisted

	whys // how many there are
)

// ByStatus is the reason for a status of an engine's answer. status 0: an event reports a failure without a status.
func ByStatus(status int) Why {
	switch {
	case status == 429:
		return Throttled
	case status/100 == 4:
		return Rejected
	}
	switch status {
	case 500:
		return Failed
	case 501:
		return Unable
	case 503:
		return Busy
	case 0, 502, 504:
		return Erred
	}
	return Odd
}

// How is what becomes of the KV that a prefill engine has, or may have, for a request.
type How uint8

// The ways.
const (
	unsaid  How = iota // it cannot be: the table has no entry
	Keep               // it is offered to the next engine: no byte of a request that names it was written to an engine
	Free               // the prefill engine has no KV, or has freed it
	Refuse             // as Free, and the engine has failed
	Lose               // the engine has failed, and may hold the KV until its hold timeout
	Orphan             // no engine will fetch it: the prefill engine frees it at its hold timeout
	Discard            // a decode engine fetches it and throws it away
	Doubt              // an engine may have read it. It is discarded once it is clear that the request is not what breaks engines
	DoubtOn            // as Doubt, and the engine has not said that it is done with the request
	Spent              // only of a Sole leg, which has no KV: the engine may have computed the request's tokens
)

// Next is what becomes of the request.
type Next uint8

// What may follow.
const (
	Over      Next = iota // no other attempt: no engine would answer otherwise
	Elsewhere             // no other attempt here, but an engine of another region may answer otherwise
	Again                 // another attempt, which is counted
	Unreached             // another attempt, counted with those that reached no engine
	Untaken               // another attempt, counted with those of which an engine took nothing
	NoRoom                // another attempt, counted with those for which an engine had no room in its KV memory
	Held                  // another attempt, counted with those for which an engine was not there
	Granted               // another attempt, for which the budget was asked before
	NoModel               // another attempt, counted with those of which an engine did not have the model
	Anew                  // another attempt, not counted: nothing failed
	Redial                // another attempt over new connections, not counted: the one before had a connection that had ended unseen
	Ask                   // its decode group's owner is asked
	Same                  // the same engine gets it once more, over a new connection
)

// Blame is which component a failure is held against.
type Blame uint8

// Whose fault it is.
const (
	Nobody   Blame = iota // the request, the client or the proxy is at fault, or the failure is already counted elsewhere
	Engine                // the engine's
	Wedged                // the engine's, which may stand still
	Disputed              // the engine's or the request's: the next engine shows it
)

// A row of the tables: what becomes of the KV by how far the leg had come, and what follows.
type row struct {
	kv   [Through + 1]How
	next Next
	whom Blame
}

// prefills is what follows the end of a prefill leg. A prefill engine's failures are counted when the lease of the prompt is settled, so
// whom only matters for a 500.
var prefills = [whys]row{
	//              Unsent  Sent    Headed  Through
	// the engine stops a prefill when its connection ends, and keeps the KV of a prefill that it answers
	Left:    {[...]How{Free, Free, Orphan, Discard}, Over, Nobody},
	Leaving: {[...]How{Free, Free, Orphan, Discard}, Over, Nobody},
	Moved:   {[...]How{Free, Free, Orphan, Discard}, Anew, Nobody},
	HungUp:  {[...]How{Free, Free, Orphan, Discard}, Elsewhere, Nobody},
	// the KV that it was to fetch, of the turn before, is gone; the next attempt computes the prompt
	Expired:   {[...]How{unsaid, unsaid, Free, unsaid}, Anew, Nobody},
	Unowned:   {[...]How{Free, unsaid, unsaid, Orphan}, Ask, Nobody}, // the pool's answers come before an early prefill, and after a late one
	NoRank:    {[...]How{Free, unsaid, unsaid, Discard}, Over, Nobody},
	RanksLost: {[...]How{Free, unsaid, unsaid, Orphan}, Anew, Nobody}, // no rank is left that could fetch it
	Ignored:   {[...]How{unsaid, unsaid, unsaid, Discard}, Over, Nobody},
	TooLong:   {[...]How{unsaid, unsaid, unsaid, Discard}, Over, Nobody}, // the decode engine would refuse it after it had read the KV

	Stale:       {[...]How{Free, Orphan, unsaid, unsaid}, Redial, Nobody}, // the engine may have read the prompt all the same
	Unreachable: {[...]How{Refuse, unsaid, unsaid, unsaid}, Unreached, Nobody},
	Broke:       {[...]How{Refuse, Lose, Lose, unsaid}, Again, Nobody},
	Silent:      {[...]How{Refuse, Lose, Lose, unsaid}, Again, Nobody}, // silence may hide a finished prefill and its KV
	Garbled:     {[...]How{unsaid, Lose, Lose, unsaid}, Again, Nobody}, // KV that cannot be named may be held
	TooLarge:    {[...]How{unsaid, Lose, Lose, unsaid}, Again, Nobody},
	Unnamed:     {[...]How{Refuse, unsaid, unsaid, unsaid}, Again, Nobody},
	Bare:        {[...]How{unsaid, unsaid, Refuse, unsaid}, Again, Nobody}, // without a hand-off the engine keeps nothing
	Empty:       {[...]How{unsaid, unsaid, Free, unsaid}, Again, Nobody},
	Restarted:   {[...]How{unsaid, unsaid, Orphan, unsaid}, Again, Nobody},
	Unconfirmed: {[...]How{unsaid, Free, Free, Free}, Again, Nobody},
	Incomplete:  {[...]How{unsaid, Free, Free, Free}, Again, Nobody},

	Rejected:  {[...]How{unsaid, unsaid, Free, unsaid}, Over, Nobody},
	Throttled: {[...]How{unsaid, unsaid, Refuse, unsaid}, Untaken, Nobody},
	Busy:      {[...]How{unsaid, unsaid, Refuse, unsaid}, Untaken, Nobody},
	Failed:    {[...]How{unsaid, unsaid, Refuse, unsaid}, Again, Disputed},
	Erred:     {[...]How{unsaid, unsaid, Refuse, unsaid}, Again, Nobody},
	Unable:    {[...]How{unsaid, unsaid, Free, unsaid}, Elsewhere, Nobody},
	Odd:       {[...]How{unsaid, unsaid, Refuse, unsaid}, Elsewhere, Nobody},
	Withheld:  {[...]How{unsaid, unsaid, Free, unsaid}, Held, Nobody},
	Unlisted:  {[...]How{unsaid, unsaid, Free, unsaid}, NoModel, Nobody},
}

// decodes is what follows the end of a decode leg.
var decodes = [whys]row{
	//              Unsent  Sent     Headed   Through
	Left:        {[...]How{Keep, DoubtOn, DoubtOn, Free}, Over, Nobody},
	Leaving:     {[...]How{Keep, DoubtOn, DoubtOn, Free}, Elsewhere, Nobody},
	Moved:       {[...]How{Keep, DoubtOn, DoubtOn, Free}, Anew, Nobody},
	HungUp:      {[...]How{Keep, DoubtOn, DoubtOn, Free}, Elsewhere, Nobody},
	NotOurs:     {[...]How{Keep, unsaid, unsaid, unsaid}, Anew, Nobody},
	Unready:     {[...]How{Free, unsaid, unsaid, unsaid}, Over, Nobody},
	Unlearned:   {[...]How{Free, unsaid, unsaid, unsaid}, Anew, Nobody},
	Outlived:    {[...]How{Free, unsaid, unsaid, unsaid}, Anew, Nobody},
	MayOutlive:  {[...]How{Orphan, unsaid, unsaid, unsaid}, Anew, Nobody},
	Expired:     {[...]How{Orphan, unsaid, unsaid, unsaid}, Again, Nobody},
	Disbelieved: {[...]How{unsaid, unsaid, unsaid, Free}, Again, Nobody},
	Ignored:     {[...]How{unsaid, unsaid, unsaid, Free}, Over, Nobody},

	Stale:       {[...]How{Keep, DoubtOn, unsaid, unsaid}, Redial, Nobody}, // it does not prove that the KV was not read
	Unreachable: {[...]How{Keep, unsaid, unsaid, unsaid}, Unreached, Engine},
	Broke:       {[...]How{Keep, DoubtOn, DoubtOn, Free}, Again, Engine}, // a connection that breaks does not prove that the KV was not read
	Silent:      {[...]How{Keep, DoubtOn, DoubtOn, Free}, Again, Wedged},
	Garbled:     {[...]How{unsaid, DoubtOn, DoubtOn, Free}, Again, Engine},
	TooLarge:    {[...]How{unsaid, DoubtOn, DoubtOn, Free}, Over, Nobody},
	Uncalled:    {[...]How{unsaid, Free, unsaid, unsaid}, Again, Engine}, // nothing is prefilled before the callback
	Misplaced:   {[...]How{unsaid, Free, unsaid, unsaid}, Over, Nobody},
	Unbegun:     {[...]How{unsaid, Orphan, Orphan, unsaid}, Again, Engine},
	Stuck:       {[...]How{unsaid, DoubtOn, DoubtOn, unsaid}, Granted, Wedged},
	Unusable:    {[...]How{unsaid, unsaid, DoubtOn, Free}, Over, Engine},

	// a status may also come from a proxy in front of the engine, or after the KV was read
	Rejected:  {[...]How{unsaid, unsaid, Doubt, Free}, Over, Nobody},
	Throttled: {[...]How{unsaid, unsaid, Doubt, Free}, Again, Nobody},
	Busy:      {[...]How{unsaid, unsaid, Doubt, Free}, Again, Engine},
	Failed:    {[...]How{unsaid, unsaid, Doubt, Free}, Again, Disputed},
	Erred:     {[...]How{unsaid, unsaid, Doubt, Free}, Again, Engine},
	Unable:    {[...]How{unsaid, unsaid, Doubt, Free}, Elsewhere, Nobody},
	Odd:       {[...]How{unsaid, unsaid, Doubt, Free}, Elsewhere, Engine},
	GivenBack: {[...]How{unsaid, unsaid, Doubt, Free}, NoRoom, Nobody},
	Withheld:  {[...]How{unsaid, unsaid, Doubt, Free}, Held, Nobody}, // its bytes were written, so no second engine may have the hand-off
	Unlisted:  {[...]How{unsaid, unsaid, Doubt, Free}, NoModel, Nobody},
}

// Ended is what is known of a leg that has ended without what it was for.
type Ended struct {
	Leg   Leg
	Far   Far
	Why   Why
	Kept  bool // the prefill engine keeps KV until a decode engine fetches it, and names it in its answer
	Frees bool // a decode engine that refuses a request has the prefill engine free its KV
	Moved bool // the engine was taken out of service meanwhile
	Open  bool // the engine's answer has begun with status 200, so that it may still work on the request, or has done so
}

// Verdict is what becomes of a request whose leg has ended.
type Verdict struct {
	KV    How
	Next  Next
	Blame Blame
}

// Verdict looks up what follows the end of the leg: what becomes of the KV, what the request does next, and who is to blame.
func (e Ended) Verdict() Verdict {
	r := &prefills[e.Why]
	switch e.Leg {
	case Prefill:
	case Decode:
		r = &decodes[e.Why]
	case Sole:
		return e.sole()
	}
	v := Verdict{KV: r.kv[e.Far], Next: r.next, Blame: r.whom}
	switch {
	case v.KV == unsaid && e.Leg == Prefill:
		// The table has no entry, which is a bug. Orphan is safe: no engine is told to fetch KV that may not be there, and an engine that
		// has it frees it at its hold timeout.
		v.KV = Orphan
	case v.KV == unsaid:
		v.KV = DoubtOn
	case v.KV == Doubt && e.Open:
		v.KV = DoubtOn
	case v.KV == Doubt && e.Frees && e.Why != Withheld: // with Withheld, the part of the engine that would free the KV never saw the request
		v.KV = Free
	}
	if e.Leg == Prefill && !e.Kept { // the engine keeps no KV that would have to be fetched or to run out
		switch v.KV {
		case Lose:
			v.KV = Refuse
		case Orphan, Discard:
			v.KV = Free
		}
	}
	if e.Moved { // an engine that was taken out of service is not to blame
		if v.Blame = Nobody; v.Next != Over {
			v.Next = Anew
		}
	}
	return v
}

// Unheard says, of a leg that ended without a first event, whether its engine took the request and is to blame that no event came.
func (e Ended) Unheard() bool {
	return e.Why == Unbegun || e.Open && e.Verdict().Blame != Nobody
}

// OfEngine says whether the leg's engine is why the leg has ended: its answer says so, or its connection or answer failed.
func (e Ended) OfEngine() bool { return e.Why >= Stale && !e.Moved }

// sole is the verdict on a Sole leg. The engine keeps nothing of the request, so another engine can compute it. But a request that may
// have killed its engine goes to no other one. A request of which no byte was sent always goes to another one.
func (e Ended) sole() Verdict {
	v := Verdict{KV: Spent, Next: Elsewhere, Blame: Engine}
	if e.Far == Unsent || e.Why == Stale || e.Why >= Lacks && !e.Open {
		v.KV = Free
	}
	switch {
	case e.Moved:
		v.Next = Again
	case e.Why == Stale: // most likely the connection ended before the engine saw the request
		v.Next = Same
	case e.Why == Withheld:
		v.Next, v.Blame = Again, Nobody
	case e.Why == Unlisted:
		v.Next, v.Blame = NoModel, Nobody
	case e.Far == Unsent || e.Why == Throttled || e.Why == Busy:
		v.Next = Again
	case e.Why == Lacks:
		v.Next = Anew
	case e.Why == Rejected:
		v.Next = Over
	}
	return v
}

// Refused says whether the engine of a decode leg has too many requests: it refused this one, and read nothing of it.
func (e Ended) Refused() bool {
	return e.Leg == Decode && (e.Why == Busy || e.Why == Throttled)
}

// Untaken says whether the engine of a leg took nothing of the request, so that another engine may take its place.
func (e Ended) Untaken() bool {
	return e.Far == Unsent && e.Why != HungUp && e.Why != Moved || e.Why == Throttled || e.Why == Busy || e.Why == Withheld ||
		e.Why == Unlisted
}
