package policy

import (
	"math"
	"math/bits"
)

// redrawEvery is for how many tokens an end that was drawn is kept. More often
// brings nothing but work, more rarely costs balance on heavy tails.
const redrawEvery = 4

// draws are the sampled ends of requests, as the ages at which they finish. A
// request's draws are spread evenly over the distribution of its ends and are
// the same at every tick until it outlives one of them: what changes between two
// ticks then is the world, not the dice. They depend on nothing but the table,
// the id and the age, so that a recorded round can be decided again.
type draws struct {
	n       int
	outlook Outlook
	keyed   Keyed   // nil: by age alone
	sampler sampler // nil: a quantile at a time
	version uint64

	size    int     // of a record
	perRank int     // records
	made    []int32 // of rank after rank, a record for each request that runs there
	own     []int32 // a record for requests that do not decode yet
}

// A record is the id of the request in two halves, the age its ends were drawn
// at, for how many ages from there they hold, 0 = none, and the ends. Records lie
// in the order in which a tick reads them: by slot, a thousand ranks would wait
// for memory half of the time. A request that moved within its rank's list is
// drawn once more, which changes nothing.
const (
	recordLow = iota
	recordHigh
	recordFrom
	recordValid
	recordEnds
)

func (d *draws) resolve(n int, o Outlook, keyed bool) {
	d.outlook, d.keyed, d.sampler = o, nil, nil
	if k, ok := o.(Keyed); ok && keyed {
		d.keyed = k
	} else if s, ok := o.(sampler); ok {
		d.sampler = s
	}
	if v := o.Version(); n != d.n || v != d.version {
		d.n, d.version = n, v
		d.size = recordEnds + n
		d.own = sized(d.own, d.size)
		clear(d.made)
	}
}

// makeRoom has a record for everything that runs.
func (d *draws) makeRoom(workers []Worker) {
	most := 0
	for g := range workers {
		most = max(most, len(workers[g].Running))
	}
	if most > d.perRank || len(workers)*d.perRank*d.size > len(d.made) {
		d.perRank = max(d.perRank, most+most/4)
		d.made = make([]int32, len(workers)*d.perRank*d.size)
	}
}

// of are the records of rank g.
func (d *draws) of(g int) []int32 {
	n := d.perRank * d.size
	return d.made[g*n:][:n]
}

// fresh returns the finishing ages of a request that does not decode yet.
func (d *draws) fresh(id uint64, prompt int32, key uint64, age int32) []int32 {
	return d.draw(d.own, id, prompt, key, age)
}

// draw fills a record and returns its ends. They are drawn at every fourth
// token; a request that outlived one of them is drawn anew where it did.
func (d *draws) draw(record []int32, id uint64, prompt int32, key uint64, age int32) []int32 {
	ends, phase := record[recordEnds:], phaseOf(id)
	age = min(max(0, age), 1<<30)
	from := age &^ (redrawEvery - 1)
	blockEnd := from + redrawEvery
	for {
		d.left(prompt, key, from, phase, ends)
		until := blockEnd
		for z, left := range ends {
			left = from + min(left, math.MaxInt32-from)
			ends[z] = left
			until = min(until, left)
		}
		if age < until {
			record[recordLow], record[recordHigh] = int32(id), int32(id>>32)
			record[recordFrom], record[recordValid] = from, until-from
			return ends
		}
		from = until
	}
}

// left writes the tokens that a request of this age has left, at least 1, at
// quantiles spread evenly from its phase.
func (d *draws) left(prompt int32, key uint64, age int32, phase float64, left []int32) {
	if d.sampler != nil {
		d.sampler.Quantiles(int(age), phase, left)
		return
	}
	each := 1 / float64(len(left))
	for z := range left {
		u := phase + float64(z)*each
		if u >= 1 {
			u--
		}
		var x float64
		if d.keyed != nil {
			x = d.keyed.ResidOf(prompt, key, int(age), u)
		} else {
			x = d.outlook.Resid(int(age), u)
		}
		left[z] = int32(max(1, min(x, math.MaxInt32)))
	}
}

// phaseOf is the request's own number in [0, 1): splitmix64's finaliser of its id.
func phaseOf(id uint64) float64 {
	id = (id ^ id>>30) * 0xbf58476d1ce4e5b9
	id = (id ^ id>>27) * 0x94d049bb133111eb
	return float64((id^id>>31)>>11) / (1 << 53)
}

func bitLen(n int32) int { return bits.Len32(uint32(n)) }

// ratios are P(O > age+h | O > age) at the steps of the grid, a row for each age
// once asked for.
type ratios struct {
	steps   []int64
	outlook Outlook
	version uint64
	known   []bool // by age
	rows    []float64
	own     []float64 // of an age beyond the cache
}

// mostAges bounds the cache by age.
const mostAges = 1 << 14

func (r *ratios) resolve(steps []int64, o Outlook) {
	r.outlook = o
	if v := o.Version(); v != r.version || len(steps) != len(r.steps) || r.known == nil {
		r.version = v
		r.known, r.rows, r.own = sized(r.known, mostAges), sized(r.rows, mostAges*len(steps)), sized(r.own, len(steps))
		clear(r.known)
	}
	r.steps = steps
}

func (r *ratios) at(age int32) []float64 {
	n := len(r.steps)
	row := r.own
	if uint(age) < uint(len(r.known)) {
		row = r.rows[int(age)*n:][:n]
		if r.known[age] {
			return row
		}
		r.known[age] = true
	}
	for c, h := range r.steps {
		row[c] = r.outlook.Ratio(int(age), int(h))
	}
	return row
}
