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
	servedHere                  // the request got a prefill engine or a rank here, so its retries stay with this dispatcher
	stranded                    // the region that has to decode its hand-off has no rank for the request any more
	triedHere                   // every attempt here failed, and the request was not at fault
	unowned                     // another proxy of this region owns its decode group, or owned it and gave the request back
	returned                    // another dispatcher gave the request back, or evenkeel asked twice where it should go: it stays here for good
	strandedLast                // the request stays here for good, and the region that has to decode its hand-off has no rank any more
)

type move uint8

const (
	gotTurn   move = iota // a prefill engine here, or a rank that computes the prompt, takes the request
	gaveBack              // a proxy of another region gave the request back
	askAgain              // a proxy of this region gave the request back
	lostRanks             // the region that has to decode the hand-off has no rank any more, or belongs to another proxy
	lostGroup             // another proxy took over its decode group before a rank had the request
	failed                // every attempt here failed
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

// tryMove makes a move, and says whether the table allows it. A move that is not allowed changes nothing.
func (r *routing) tryMove(m move) (ok bool) {
	next, ok := allowedMoves[*r][m]
	if ok {
		*r = next
	}
	return ok
}

// MayAsk says whether evenkeel may still ask which dispatcher should serve the request.
func (r routing) MayAsk() bool { return r == arrived || r == triedHere || r == unowned }

// HasWaited says whether the request has waited in the arrival queue before, and so returns to its old place there.
func (r routing) HasWaited() bool { return r != arrived && r != servedHere }

// TriedHere says whether every attempt here has failed.
func (r routing) TriedHere() bool { return r == triedHere }

// StaysForGood says whether the request is never forwarded again, because another dispatcher gave it back, or because evenkeel asked twice
// where it should go.
func (r routing) StaysForGood() bool { return r == returned }
