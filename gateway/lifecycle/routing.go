package lifecycle

// routing is what has happened to a request, as far as it decides where the request may
// still be served. These are the moves from one state to the next; where the table has no
// entry, the move is not allowed, and the request ends with the error that it has:
//
//	from \ by    gotTurn       gaveBack    askAgain   lostRanks    lostGroup  failed
//	arrived      servedHere   returned    unowned    -            -          -
//	servedHere   servedHere   -           -          stranded     unowned    triedHere
//	stranded     stranded     -           -          -            unowned    triedHere
//	triedHere    returned     returned    unowned    -            -          -
//	unowned      returned     returned    unowned    -            -          -
//	returned     returned     -           -          strandedLast unowned    -
//	strandedLast strandedLast -           -          -            unowned    -
//
// In the states arrived, triedHere and unowned, evenkeel asks whether another dispatcher
// should serve the request. Once the request has got an engine here, its retries stay
// here. Only a request whose client has no part of the answer moves at all: a lost
// answer stays with this proxy, and goes on there or ends.
type routing uint8

const (
	arrived      routing = iota // the request has just come
	servedHere                  // an engine or a rank here took it, so its retries stay here
	stranded                    // no rank for its hand-off in the region that has to decode it
	triedHere                   // the request was not at fault
	unowned                     // another proxy of this region owns its group, or did and gave it back
	returned                    // for good: it was given back, or evenkeel asked twice
	strandedLast                // both returned and stranded
)

type move uint8

const (
	gotTurn   move = iota // a prefill engine or a rank here takes the request
	gaveBack              // by a proxy of another region
	askAgain              // gave it back: a proxy of this region
	lostRanks             // no rank for the hand-off, or another proxy's
	lostGroup             // another proxy took over, before a rank had the request
	failed
)

var allowedMoves = map[routing]map[move]routing{
	arrived:      {gotTurn: servedHere, gaveBack: returned, askAgain: unowned},
	servedHere:   {gotTurn: servedHere, lostRanks: stranded, lostGroup: unowned, failed: triedHere},
	stranded:     {gotTurn: stranded, lostGroup: unowned, failed: triedHere},
	triedHere:    {gotTurn: returned, gaveBack: returned, askAgain: unowned},
	unowned:      {gotTurn: returned, gaveBack: returned, askAgain: unowned},
	returned:     {gotTurn: returned, lostRanks: strandedLast, lostGroup: unowned},
	strandedLast: {gotTurn: strandedLast, lostGroup: unowned},
}

func (r *routing) tryMove(m move) (ok bool) {
	next, ok := allowedMoves[*r][m]
	if ok {
		*r = next
	}
	return ok
}

// MayAsk says whether evenkeel may still ask which dispatcher should serve the request.
func (r routing) MayAsk() bool { return r == arrived || r == triedHere || r == unowned }

// HasWaited: the request returns to its old place in the arrival queue.
func (r routing) HasWaited() bool { return r != arrived && r != servedHere }

func (r routing) TriedHere() bool { return r == triedHere }

func (r routing) StaysForGood() bool { return r == returned }
