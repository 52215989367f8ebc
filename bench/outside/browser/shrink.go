package browser

import (
	"bytes"
	"cmp"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"slices"
)

// Shrink gives every picture of a folder a palette, where that makes it
// smaller: a repository keeps each of them for ever.
func Shrink(folder string, out io.Writer) error {
	files, err := filepath.Glob(filepath.Join(folder, "*.png"))
	if err != nil {
		return err
	}
	sum := 0
	for _, file := range files {
		before, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		picture, err := png.Decode(bytes.NewReader(before))
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		var after bytes.Buffer
		if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&after, withPalette(picture)); err != nil {
			return err
		}
		size := min(len(before), after.Len())
		if size < len(before) {
			if err := os.WriteFile(file, after.Bytes(), 0o644); err != nil {
				return err
			}
		}
		sum += size
		fmt.Fprintf(out, "%-32s %4d KB, was %d KB\n", file, size>>10, len(before)>>10)
	}
	fmt.Fprintf(out, "%d pictures, %d KB\n", len(files), sum>>10)
	return nil
}

// shade is a colour and how many points have it.
type shade struct {
	color.RGBA
	points int
}

// withPalette is the picture with 256 colours: its own if there are no more.
func withPalette(picture image.Image) *image.Paletted {
	full := image.NewRGBA(picture.Bounds())
	draw.Draw(full, full.Bounds(), picture, full.Bounds().Min, draw.Src)
	counts := map[color.RGBA]int{}
	for i := 0; i < len(full.Pix); i += 4 {
		counts[color.RGBA{R: full.Pix[i], G: full.Pix[i+1], B: full.Pix[i+2], A: full.Pix[i+3]}]++
	}
	shades := make([]shade, 0, len(counts))
	for c, n := range counts {
		shades = append(shades, shade{c, n})
	}
	slices.SortFunc(shades, func(a, b shade) int { // a map has no order, a picture is to be the same twice
		return cmp.Or(cmp.Compare(a.R, b.R), cmp.Compare(a.G, b.G), cmp.Compare(a.B, b.B), cmp.Compare(a.A, b.A))
	})
	boxes := [][]shade{shades}
	for len(boxes) < 256 {
		widest, channel := -1, 0
		most := 0
		for i, b := range boxes {
			if c, spread := spread(b); spread > most {
				widest, channel, most = i, c, spread
			}
		}
		if widest < 0 { // each box is one colour
			break
		}
		a, b := halve(boxes[widest], channel)
		boxes[widest] = a
		boxes = append(boxes, b)
	}
	flat := image.NewPaletted(full.Bounds(), nil)
	index := map[color.RGBA]uint8{}
	for i, b := range boxes {
		flat.Palette = append(flat.Palette, mean(b))
		for _, s := range b {
			index[s.RGBA] = uint8(i)
		}
	}
	for i := range flat.Pix {
		p := full.Pix[4*i:]
		flat.Pix[i] = index[color.RGBA{R: p[0], G: p[1], B: p[2], A: p[3]}]
	}
	return flat
}

func (s shade) channel(i int) int { return int([4]uint8{s.R, s.G, s.B, s.A}[i]) }

// spread is the channel in which a box's colours differ most, and by how much.
func spread(box []shade) (channel, most int) {
	for c := range 4 {
		least, largest := 255, 0
		for _, s := range box {
			least, largest = min(least, s.channel(c)), max(largest, s.channel(c))
		}
		if largest-least > most {
			channel, most = c, largest-least
		}
	}
	return channel, most
}

// halve cuts a box in the middle of a channel's range, so that lines that few
// points have keep their colour beside a large background.
func halve(box []shade, channel int) (low, high []shade) {
	slices.SortStableFunc(box, func(a, b shade) int { return cmp.Compare(a.channel(channel), b.channel(channel)) })
	middle := (box[0].channel(channel) + box[len(box)-1].channel(channel)) / 2
	at := slices.IndexFunc(box, func(s shade) bool { return s.channel(channel) > middle })
	return box[:at], box[at:]
}

// mean is a box's colour, by points.
func mean(box []shade) color.Color {
	var sum [4]int
	points := 0
	for _, s := range box {
		for c := range sum {
			sum[c] += s.channel(c) * s.points
		}
		points += s.points
	}
	value := func(c int) uint8 { return uint8((sum[c] + points/2) / points) }
	return color.RGBA{R: value(0), G: value(1), B: value(2), A: value(3)}
}
