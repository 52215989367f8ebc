package live

import (
	"bytes"
	"compress/gzip"
	"io"
	"sort"
	"sync"
	"time"
)

// judgeEvery is how many samples lie between two verdicts while nobody watches, and between two strips.
const judgeEvery = 5

// What is kept of documents, compressed: so long, and never more than so many bytes.
const (
	pastFor   = 15 * time.Minute
	pastBytes = 16 << 20
	pastStep  = judgeEvery * sampleEvery // by which the clock may be set back
)

// past is the documents of the last minutes, one for each time they were judged, so
// that somebody can see what was to be seen then.
type past struct {
	mu    sync.Mutex
	zip   *gzip.Writer // kept: it is large
	list  []pastDocument
	bytes int
}

type pastDocument struct {
	at   int64 // Unix ms
	data []byte
}

func (p *past) keep(at int64, document []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var b bytes.Buffer
	if p.zip == nil {
		p.zip, _ = gzip.NewWriterLevel(nil, gzip.BestSpeed) // the level is one that there is
	}
	p.zip.Reset(&b)
	if _, err := p.zip.Write(document); err != nil || p.zip.Close() != nil { // memory takes all
		return
	}
	if n := len(p.list); n > 0 {
		if last := p.list[n-1].at; at < last-pastStep.Milliseconds() { // the clock was set back: these are of times to come
			p.list, p.bytes = nil, 0
		} else {
			at = max(at, last) // the list is sorted
		}
	}
	p.list = append(p.list, pastDocument{at, bytes.Clone(b.Bytes())})
	p.bytes += b.Len()
	old := 0
	for old < len(p.list)-1 && (p.list[old].at < at-pastFor.Milliseconds() || p.bytes > pastBytes) {
		p.bytes -= len(p.list[old].data)
		p.list[old].data = nil
		old++
	}
	p.list = p.list[old:]
}

// find is the last document up to a moment, compressed.
func (p *past) find(at int64) (data []byte, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := sort.Search(len(p.list), func(i int) bool { return p.list[i].at > at })
	if i == 0 {
		return nil, false
	}
	return p.list[i-1].data, true
}

// unzip is for those who do not take gzip.
func unzip(data []byte, to io.Writer) error {
	r, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return err
	}
	_, err = io.Copy(to, r) //nolint:gosec // it is our own
	return err
}
