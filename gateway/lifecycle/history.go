package lifecycle

// history is what a request has behind it, as far as that decides where it may still
// be served. It is in one state at a time, and these are its legal moves; where the
// table has no entry, the request ends with what it has:
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
// should have the request. Once it has got its turn here it stays: a retry does not
// leave. Only a request whose client has nothing yet moves at all; a lost answer goes on
// through this proxy, or ends.
type history uint8

const (
	arrived      history = iota // nothing: it has just come
	servedHere                  // it got its turn here, and its retries stay
	stranded                    // its hand-off was in a region that has no rank for it any more
	triedHere                   // every attempt here failed, by no fault of its own
	unowned                     // another proxy of this region admits to its decode group, or had it and gave it back
	returned                    // another dispatcher gave it back, or it was asked about twice: it stays for good
	strandedLast                // it stayed for good, and then its hand-off's region had no rank any more
)

type move uint8

const (
	gotTurn   move = iota // its turn came here: a prefill engine, or a rank that computes the prompt
	gaveBack              // a proxy of another region gave it back
	askAgain              // a proxy of this region gave it back
	lostRanks             // the region of its hand-off has no rank any more, or is another proxy's
	lostGroup             // its decode group became another proxy's before a rank had it
	failed                // every attempt here failed
)

var moves = map[history]map[move]history{
	arrived:      {gotTurn: servedHere, gaveBack: returned, askAgain: unowned},
	servedHere:   {gotTurn: servedHere, lostRanks: stranded, lostGroup: unowned, failed: triedHere},
	stranded:     {gotTurn: stranded, lostGroup: unowned, failed: triedHere},
	triedHere:    {gotTurn: returned, gaveBack: returned, askAgain: unowned},
	unowned:      {gotTurn: returned, gaveBack: returned, askAgain: unowned},
	returned:     {gotTurn: returned, lostRanks: strandedLast, lostGroup: unowned},
	strandedLast: {gotTurn: strandedLast, lostGroup: unowned},
}

// moves makes a move and says whether it is legal. A move that is not legal changes nothing.
func (h *history) moves(m move) (ok bool) {
	next, ok := moves[*h][m]
	if ok {
		*h = next
	}
	return ok
}

// Open says whether another dispatcher may still get the request.
func (h history) Open() bool { return h == arrived || h == triedHere || h == unowned }

// Waited says whether the request has its old place in the arrival queue.
func (h history) Waited() bool { return h != arrived && h != servedHere }

// Tried says whether every attempt here has failed.
func (h history) Tried() bool { return h == triedHere }

// Stays says that the request stays here for good.
func (h history) Stays() bool { return h == returned }
