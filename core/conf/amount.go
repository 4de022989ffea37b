package conf

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
)

// Amount is a size, a percentage of something the key names, or a word. The
// zero Amount is "not set".
type Amount struct {
	Bytes   int64
	Percent int    // 1 to 100
	Word    string // "auto", "off", "none"
}

// Of is the amount in bytes where total is what a percentage is of. It is 0
// for a word and for the zero Amount.
func (a Amount) Of(total int64) int64 {
	if a.Percent == 0 {
		return a.Bytes
	}
	n := new(big.Int).Mul(big.NewInt(total), big.NewInt(int64(a.Percent)))
	return n.Quo(n, big.NewInt(100)).Int64()
}

// String is the amount as the file writes it; "" for the zero Amount.
func (a Amount) String() string {
	switch {
	case a.Word != "":
		return a.Word
	case a.Percent != 0:
		return strconv.Itoa(a.Percent) + "%"
	case a.Bytes != 0:
		return FormatSize(a.Bytes)
	}
	return ""
}

func parseAmount(s string, words []string) (Amount, error) {
	if slices.Contains(words, s) {
		return Amount{Word: s}, nil
	}
	if n, ok := strings.CutSuffix(s, "%"); ok {
		p, err := strconv.ParseUint(n, 10, 8)
		if err != nil || p < 1 || p > 100 {
			return Amount{}, fmt.Errorf("%q is not a percentage from 1%% to 100%%", s)
		}
		return Amount{Percent: int(p)}, nil
	}
	n, err := ParseSize(s)
	if err == nil && n == 0 {
		err = fmt.Errorf("%q is nothing", s)
	}
	return Amount{Bytes: n}, err
}

const units = "KMGTP"

// ParseSize reads a size: digits and one of K, M, G, T or P (powers of 1024),
// as in "512M". "MiB" and "iB" endings are read too; a number without a unit
// is not, since bytes and gigabytes are too easily confused.
func ParseSize(s string) (int64, error) {
	i := 0
	for i < len(s) && s[i] >= '0' && s[i] <= '9' {
		i++
	}
	n, err := strconv.ParseInt(s[:i], 10, 64)
	u := strings.TrimSuffix(s[i:], "iB")
	k := -1
	if len(u) == 1 {
		k = strings.IndexByte(units, u[0])
	}
	if err != nil || k < 0 {
		return 0, fmt.Errorf(`%q is not a size: expected digits and one of K, M, G, T, P, as in "4G"`, s)
	}
	shift := 10 * (k + 1)
	if n > math.MaxInt64>>shift {
		return 0, errors.New(s + " is more than 8 exbibytes")
	}
	return n << shift, nil
}

// FormatSize is n in the largest unit that divides it, so that ParseSize
// gives n back for every multiple of 1024.
func FormatSize(n int64) string {
	if n == 0 || n%1024 != 0 {
		return strconv.FormatInt(n, 10)
	}
	k := -1
	for n%1024 == 0 && k+1 < len(units) {
		n /= 1024
		k++
	}
	return strconv.FormatInt(n, 10) + units[k:k+1]
}
