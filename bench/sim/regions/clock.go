package regions

// clock calls what is due, in the order of time and then of planning.
type clock struct {
	now   float64
	queue []due
	count uint64
}

type due struct {
	at  float64
	seq uint64
	run func()
}

func (a *due) before(b *due) bool { return a.at < b.at || a.at == b.at && a.seq < b.seq }

// after plans a call in so many ms.
func (c *clock) after(ms float64, run func()) {
	c.count++
	c.queue = append(c.queue, due{c.now + ms, c.count, run})
	for i := len(c.queue) - 1; i > 0; {
		parent := (i - 1) / 2
		if !c.queue[i].before(&c.queue[parent]) {
			break
		}
		c.queue[i], c.queue[parent] = c.queue[parent], c.queue[i]
		i = parent
	}
}

// next makes the next call, unless it is due later than until.
func (c *clock) next(until float64) bool {
	if len(c.queue) == 0 || c.queue[0].at > until {
		return false
	}
	first, last := c.queue[0], len(c.queue)-1
	c.queue[0], c.queue[last] = c.queue[last], due{}
	c.queue = c.queue[:last]
	for i := 0; ; {
		least := i
		for child := 2*i + 1; child <= 2*i+2 && child < last; child++ {
			if c.queue[child].before(&c.queue[least]) {
				least = child
			}
		}
		if least == i {
			break
		}
		c.queue[i], c.queue[least] = c.queue[least], c.queue[i]
		i = least
	}
	c.now = first.at
	first.run()
	return true
}
