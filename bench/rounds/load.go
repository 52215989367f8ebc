package main

import (
	"fmt"
	"math"
	"math/rand/v2"

	"evenkeel/bench/regret/draw"
	"evenkeel/dispatcher/step"
)

// load is one that was drawn: requests, and the ranks that serve them.
type load struct {
	number int
	texts  draw.Texts
	chats  float64 // share of requests that go on with an earlier chat; 0: there are none
	ranks  int
	slots  int
	room   int64 // KV tokens of a rank; 0: unlimited
	budget int32
	law    step.Model
	rho    float64 // open loop: requests, as a share of what ranks could do that are always level; 0: closed
	full   float64 // closed loop: requests that are there, as a share of the slots

	seed  uint64
	there int     // requests at a time, about
	stays float64 // a request's time in the mean where all slots are full, ms
	gap   float64 // between requests, ms
}

// request is one of a load.
type request struct {
	at      float64 // ms; of a closed loop only for the first ones
	prompt  int32
	output  int32
	chat    int32   // the same number: the same chat
	shared  int32   // tokens of its prompt that the turn before it had or got
	guessed float64 // a proxy takes its prompt to be so many times as long as it is
	late    float64 // from the proxy to the engine's queue, ms
}

// The ranges. What spans more than a factor of four is drawn by its logarithm.
const (
	ranksFrom, ranksTo   = 2, 32
	slotsFrom, slotsTo   = 16, 64
	budgetFrom, budgets  = 2048, 4 // 2048 times 1, 2, 4, 8
	c0From, c0To         = 10, 60  // ms
	kvFrom, kvTo         = 0.02e-3, 0.3e-3
	requestFrom, reqTo   = 0.05, 0.4 // in half of the loads; 0 in the others
	tokenFrom, tokenTo   = 0.080, 0.160
	sharedFrom, sharedTo = 0.25, 0.55
	anyTo                = 20
	fullFrom, fullTo     = 0.5, 1.2
	rhoFrom, rhoTo       = 0.3, 0.95
	roomFrom, roomTo     = 0.6, 1.2 // in half of the loads, of what the slots hold in the mean
	chatsFrom, chatsTo   = 0.3, 0.9 // in half of the loads
	lateFrom, lateTo     = 2, 20
	guessed              = 0.3 // deviation of the logarithm
	longestPrompt        = 128_000
)

func newLoad(seed uint64, number int) *load {
	r := rand.New(rand.NewPCG(seed, uint64(number)))
	between := func(from, to float64) float64 { return from + (to-from)*r.Float64() }
	logarithm := func(from, to float64) float64 { return from * math.Pow(to/from, r.Float64()) }
	half := func(x float64) float64 {
		if r.IntN(2) == 0 {
			return 0
		}
		return x
	}
	l := &load{number: number, texts: draw.NewTexts(r)}
	l.chats = half(between(chatsFrom, chatsTo))
	l.ranks = int(math.Round(logarithm(ranksFrom, ranksTo)))
	l.slots = int(math.Round(between(slotsFrom, slotsTo)))
	l.budget = budgetFrom << r.IntN(budgets)
	token, shared := between(tokenFrom, tokenTo), between(sharedFrom, sharedTo)
	l.law = step.Model{
		C0Ms: logarithm(c0From, c0To), C1Ms: logarithm(kvFrom, kvTo), RequestMs: half(logarithm(requestFrom, reqTo)),
		OwnMs: token * (1 - shared), SharedMs: token * shared, PrefillMs: between(0, anyTo),
	}
	if l.rho = half(between(rhoFrom, rhoTo)); l.rho == 0 {
		l.full = between(fullFrom, fullTo)
	}
	room := half(between(roomFrom, roomTo))
	l.seed = r.Uint64()
	l.measure(room)
	return l
}

// measure finds how long requests stay and how many the ranks can serve, from some of them.
func (l *load) measure(room float64) {
	const n = 4000
	var prompts, outputs, resident, longest float64
	l.there = l.ranks * l.slots
	for _, q := range l.requests(n, 0) {
		o := float64(q.output)
		prompts += float64(q.prompt-q.shared) / n
		outputs += o / n
		resident += (float64(q.prompt) + o/2) * o / n
		longest = max(longest, float64(q.prompt)+o)
	}
	resident /= outputs // KV tokens of a request that decodes, in the mean
	slots := float64(l.slots)
	if room > 0 {
		l.room = int64(max(1.06*longest, room*slots*resident))
		slots = max(1, min(slots, float64(l.room)/resident))
	}
	ms := l.law.C0Ms + slots*(l.law.RequestMs+l.law.C1Ms*resident)
	g := float64(l.ranks)
	each := outputs*ms/(g*slots) + prompts*(l.law.OwnMs+l.law.SharedMs)/g // ms of the group for each request
	l.stays = each * g * slots
	l.gap = each / max(l.rho, 1e-9)
	if l.rho == 0 {
		l.there = max(1, int(math.Round(l.full*float64(l.ranks*l.slots))))
		l.gap = l.stays / float64(l.there)
	} else {
		l.there = int(l.rho * g * slots)
	}
}

// requests draws the first n, gap ms apart in the mean.
func (l *load) requests(n int, gap float64) []request {
	r := rand.New(rand.NewPCG(l.seed, 1))
	all := make([]request, n)
	var open []int32 // the last turns of chats that go on, oldest first
	at := 0.0
	for i := range all {
		q := &all[i]
		fresh := l.texts.Next(r, float64(i)/float64(n))
		goes, on, late, guess := r.Float64() < l.chats, r.IntN(4) > 0, r.Float64(), r.NormFloat64()
		*q = request{prompt: int32(fresh.Prompt), output: int32(fresh.Output), chat: int32(i), late: lateFrom + (lateTo-lateFrom)*late}
		if goes && len(open) > 0 && i-int(open[0]) > l.there { // an earlier turn has probably been answered
			before := &all[open[0]]
			open = open[1:]
			if long := before.prompt + before.output + q.prompt/4 + 1; long <= longestPrompt {
				q.chat, q.shared, q.prompt = before.chat, before.prompt+before.output, long
			}
		}
		if on {
			open = append(open, int32(i))
		}
		q.guessed = math.Exp(guessed*guess - guessed*guessed/2)
		at += gap * r.ExpFloat64()
		q.at = at
	}
	return all
}

func (l *load) String() string {
	how := fmt.Sprintf("closed, %.2f of the slots", l.full)
	if l.rho > 0 {
		how = fmt.Sprintf("open, rho %.2f", l.rho)
	}
	return fmt.Sprintf("%d: %d ranks of %d slots, %s, %s, %.0f %% go on, budget %d, c0 %.0f ms",
		l.number, l.ranks, l.slots, how, l.texts.String(), 100*l.chats, l.budget, l.law.C0Ms)
}
